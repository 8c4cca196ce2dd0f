//! Exec: the calls by which this process becomes another program.
//!
//! The new program inherits the descriptors that are not closed, with the kernel's offsets. So these are put right
//! first, as before a fork. Another thread may open more until the kernel has ended it, so the call counts as a fork
//! under way (`forks.rs`): no descriptor gets a private offset meanwhile. A failed call takes the count back.
//!
//! The owner is told, too: the next program may be one that does not join (a static one, or one with other rights), and
//! only the owner can take back what this one has attached.
//!
//! The forms with a list put the arguments from registers before those on the stack, where they make the other forms'
//! array:
//!
//! ```text
//!   execl(path, a, b, c, d, e, f, .., NULL)     stack at its entry  [ back | f, .., NULL ]
//!   execv(path, array)                          [ back | a, b, c, d, e, f, .., NULL ]
//! ```

use core::arch::naked_asm;
use core::ffi::{c_char, c_int};

use quinion_view::viewer::sys::call;

use crate::kernel::number;
use crate::wrap::{call_real, names};
use crate::{forks, ld_preload, process, real};

type List = *const *const c_char;

/// Runs a call that, if it does not fail, makes this process another program, with this environment.
fn becoming<T>(environment: List, call: impl FnOnce() -> T) -> T {
    let exec = forks::begin_fork();
    let viewer = exec.and_then(|_| process::viewer());
    viewer.inspect(|viewer| viewer.begin_exec());
    ld_preload::forget_in(environment as usize);
    let answer = call();
    viewer.inspect(|viewer| viewer.end_exec());
    if let Some(exec) = exec {
        forks::end_fork(exec);
    }
    answer
}

pub fn by_number(number: usize, args: [usize; 5]) -> isize {
    let environment = if number == number::EXECVE { args[2] } else { args[3] };
    let [a, b, c, d, e] = args;
    becoming(environment as List, || {
        // SAFETY: the call is the program's, with its arguments.
        real::answer(unsafe { call(number, [a, b, c, d, e, 0]) })
    })
}

names! {
    execve(path: *const c_char, arguments: List, environment: List) -> c_int {
        becoming(environment, || {
            call_real!(execve(path => *const c_char, arguments => List, environment => List) -> c_int)
        })
    }
    /// The environment is the one that the C library says is this process's. Where that is not patched, as in a program
    /// that was started when the owner had ended, `execve` is called inside of it and does not come by here.
    execv(path: *const c_char, arguments: List) -> c_int {
        becoming(real::environment(), || {
            call_real!(execv(path => *const c_char, arguments => List) -> c_int)
        })
    }
    execvp(name: *const c_char, arguments: List) -> c_int {
        becoming(real::environment(), || {
            call_real!(execvp(name => *const c_char, arguments => List) -> c_int)
        })
    }
    execvpe(name: *const c_char, arguments: List, environment: List) -> c_int {
        becoming(environment, || {
            call_real!(execvpe(name => *const c_char, arguments => List, environment => List) -> c_int)
        })
    }
    fexecve(fd: c_int, arguments: List, environment: List) -> c_int {
        becoming(environment, || {
            call_real!(fexecve(fd => c_int, arguments => List, environment => List) -> c_int)
        })
    }
    execveat(at: c_int, path: *const c_char, arguments: List, environment: List, flags: c_int) -> c_int {
        becoming(environment, || call_real!(execveat(
            at => c_int, path => *const c_char, arguments => List, environment => List, flags => c_int
        ) -> c_int))
    }
}

/// `execle` has the environment behind the end of the arguments.
unsafe extern "C" fn execve_listed(path: *const c_char, arguments: List) -> c_int {
    let mut at = arguments;
    // SAFETY: the caller's list ends, or the C library's function would not find its end either.
    unsafe {
        while !(*at).is_null() {
            at = at.add(1);
        }
        execve(path, arguments, at.add(1).cast::<List>().read())
    }
}

unsafe extern "C" fn execv_listed(path: *const c_char, arguments: List) -> c_int {
    // SAFETY: the program's arguments.
    unsafe { execv(path, arguments) }
}

unsafe extern "C" fn execvp_listed(name: *const c_char, arguments: List) -> c_int {
    // SAFETY: the program's arguments.
    unsafe { execvp(name, arguments) }
}

macro_rules! listed {
    ($($(#[$doc:meta])* $name:ident => $array:ident;)*) => { $(
        $(#[$doc])*
        /// # Safety
        /// That of the C library's function of this name.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "pop rax", // the way back
                "push r9", "push r8", "push rcx", "push rdx", "push rsi",
                "mov rsi, rsp",
                "push rax",
                "call {array}",
                "pop rcx",
                "add rsp, 40",
                "push rcx",
                "ret",
                array = sym $array,
            )
        }
    )* };
}

listed! {
    execl => execv_listed;
    execlp => execvp_listed;
    execle => execve_listed;
}
