//! Wrap: how a wrapper of one of the C library's functions is written, and how it calls that one.
//!
//! ```text
//!   names! { read | __read (fd: c_int, ..) -> isize { .. } }     wrappers of these names, which do the same
//!   call_real!(read(fd => c_int, ..) -> isize)                   the C library's, with the type that it has
//! ```
//!
//! A wrapper may be unwound, when a thread is cancelled inside the real function.

macro_rules! call_real {
    ($name:ident($($argument:expr => $type:ty),*) -> $answer:ty) => {{
        let function = $crate::real::Real::get(&$crate::real::$name);
        // SAFETY: the address is that of the function of this name, which has this type.
        unsafe {
            core::mem::transmute::<*mut core::ffi::c_void, unsafe extern "C-unwind" fn($($type),*) -> $answer>(function)
                ($($argument),*)
        }
    }};
}

pub(crate) use call_real;

macro_rules! names {
    ($($(#[$doc:meta])* $($name:ident)|+ ($($argument:ident: $type:ty),*) -> $answer:ty $body:block)*) => { $(
        names!(@each [$($name)+] [$(#[$doc])*] ($($argument: $type),*) -> $answer $body);
    )* };
    (@each [$($name:ident)+] $docs:tt $arguments:tt -> $answer:ty $body:block) => {
        $( names!(@one $name $docs $arguments -> $answer $body); )+
    };
    (@one $name:ident [$(#[$doc:meta])*] ($($argument:ident: $type:ty),*) -> $answer:ty $body:block) => {
        $(#[$doc])*
        /// # Safety
        /// That of the C library's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $answer $body
    };
}

pub(crate) use names;
