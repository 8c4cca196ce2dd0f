//! Loaded: the objects that the dynamic linker has loaded, and the functions that they have by name.
//!
//! ```text
//!   program, vdso, THIS OBJECT, libpthread, libc, ...      as they were loaded
//!                               '- for_each_later_object -    the first that has the name is the real function
//! ```
//!
//! `dlsym(RTLD_NEXT, name)` finds the same, and is asked where there is one. Before version 2.34 of the C library it
//! lies in a library of its own, which few programs load. For them the tables are read here: the dynamic section and
//! its symbols (System V ABI, chapter 5), found by the GNU hash section, which is a Bloom filter, buckets, and chains
//! of hashes whose lowest bit ends them; where there is none, all symbols are compared. They are read too for what a
//! plug-in brings along for itself alone, where `dlsym` does not look, and to tell whether the program's objects have
//! functions that are served.
//!
//! Invariants:
//!  1. Nothing is written. An object whose tables are not all there has no names.
//!  2. Of several versions of a name the default one is meant, as by `dlsym`.
//!
//! Not an invariant: that what is found stays loaded, except for a thread that asks at the start and has no `dlopen`.
//!
//! Cost: one walk for all names, under the dynamic linker's lock; a few loads a name and object.

use core::ffi::{CStr, c_char, c_int, c_void};

#[repr(C)]
struct ProgramHeader {
    kind: u32,
    flags: u32,
    file_offset: u64,
    address: u64,
    physical: u64,
    file_bytes: u64,
    bytes: u64,
    align: u64,
}

const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
const NOTE: u32 = 4;
const EXECUTABLE: u32 = 1;

/// The C library's `struct dl_phdr_info`, as far as it is needed.
#[repr(C)]
pub struct Object {
    pub base: usize,
    pub name: *const c_char,
    headers: *const ProgramHeader,
    headers_len: u16,
}

/// Whether an object was sought; then no other is looked at.
type Found<'a> = &'a mut dyn FnMut(&Object) -> bool;

#[link(name = "c")]
unsafe extern "C" {
    fn dl_iterate_phdr(
        callback: extern "C" fn(*const Object, usize, *mut c_void) -> c_int,
        with: *mut c_void,
    ) -> c_int;
}

/// Calls `found` with each object, in the order of loading, until it says true.
pub fn each(mut found: Found<'_>) {
    extern "C" fn callback(object: *const Object, _: usize, with: *mut c_void) -> c_int {
        // SAFETY: the C library hands over a loaded object, and back what `each` gave it, which no other code has.
        let (object, found) = unsafe { (&*object, &mut *with.cast::<Found<'_>>()) };
        c_int::from(found(object))
    }
    // SAFETY: the call hands `found` to `callback` and to no other code, before it returns.
    unsafe { dl_iterate_phdr(callback, (&raw mut found).cast()) };
}

pub fn for_each_later_object(visit: &mut dyn FnMut(&Names)) {
    let mut is_after = false;
    each(&mut |object| {
        if !is_after {
            is_after = object.has(for_each_later_object as *const () as usize);
        } else if let Some(names) = object.names() {
            visit(&names);
        }
        false
    });
}

/// Whether some object but the program, the C library and this one wraps a function that is served, or by which a
/// descriptor comes to mean another file. It may change what reads bring, so no read of such a process may be answered
/// here.
pub fn another_object_wraps() -> bool {
    let (mut is_program, mut found) = (true, false);
    each(&mut |object| {
        let is_others = !is_program
            && !object.is_of_c_library()
            && !object.has(for_each_later_object as *const () as usize);
        is_program = false; // it is the first
        if is_others && let Some(names) = object.names() {
            found = SERVED.iter().any(|&(name, hash)| names.function(name, hash).is_some());
        }
        found
    });
    found
}

macro_rules! hashed {
    ($($name:literal)*) => { [$(($name, hash($name))),*] };
}

/// The functions that are served, and those that close descriptors or put others in their places.
static SERVED: [(&CStr, u32); 22] = hashed![
    c"read" c"__read" c"pread" c"pread64" c"readv" c"preadv" c"preadv64" c"preadv2" c"preadv64v2"
    c"lseek" c"lseek64" c"__read_chk" c"__pread_chk" c"__pread64_chk"
    c"readahead" c"posix_fadvise" c"posix_fadvise64"
    c"close" c"dup2" c"dup3" c"close_range" c"closefrom"
];

pub struct Code {
    pub at: usize,
    pub bytes: usize,
    pub in_file: u64,
}

impl Object {
    fn headers(&self, kind: u32) -> impl Iterator<Item = &ProgramHeader> {
        // SAFETY: the object has that many headers.
        let all = unsafe { core::slice::from_raw_parts(self.headers, usize::from(self.headers_len)) };
        all.iter().filter(move |header| header.kind == kind)
    }

    fn address(&self, header: &ProgramHeader) -> usize {
        self.base.wrapping_add(header.address as usize)
    }

    fn has(&self, address: usize) -> bool {
        self.headers(LOAD).any(|part| address.wrapping_sub(self.address(part)) < part.bytes as usize)
    }

    /// Whether its file is one of the C library's with functions that are served. Before 2.34 its library of threads
    /// had some.
    fn is_of_c_library(&self) -> bool {
        // SAFETY: the dynamic linker's name of a loaded object is a string.
        let path = unsafe { CStr::from_ptr(self.name) }.to_bytes();
        let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
        matches!(name, b"libc.so.6" | b"libpthread.so.0") || name.starts_with(b"ld-linux")
    }

    pub fn code(&self) -> Option<Code> {
        let mut parts = self.headers(LOAD).filter(|part| part.flags & EXECUTABLE != 0);
        let (Some(part), None) = (parts.next(), parts.next()) else { return None };
        Some(Code { at: self.address(part), bytes: part.file_bytes as usize, in_file: part.file_offset })
    }

    pub fn notes(&self) -> impl Iterator<Item = &[u8]> {
        self.headers(NOTE).map(|note| {
            // SAFETY: notes are loaded where the header says, readable, with the bytes it says.
            unsafe { core::slice::from_raw_parts(self.address(note) as *const u8, note.bytes as usize) }
        })
    }

    fn names(&self) -> Option<Names> {
        const LAST: usize = 0;
        const OLD_HASH: usize = 4;
        const STRINGS: usize = 5;
        const SYMBOLS: usize = 6;
        const GNU_HASH: usize = 0x6fff_fef5;
        const VERSIONS: usize = 0x6fff_fff0;
        let mut entry = self.address(self.headers(DYNAMIC).next()?) as *const [usize; 2];
        let (mut strings, mut symbols, mut hashes, mut old_hash, mut versions) = (0, 0, 0, 0, 0);
        // SAFETY: the dynamic section is loaded there: pairs of a kind and a value, and a last one.
        while let [kind, value] = unsafe { entry.read() }
            && kind != LAST
        {
            // The linker has made addresses of some objects' values; of others they still lack the base. No order tells
            // which: the base of an object that asked for a place and got a lower one is "negative".
            let places = [value, self.base.wrapping_add(value)];
            let address = places.into_iter().find(|place| self.has(*place)).unwrap_or(0);
            match kind {
                STRINGS => strings = address,
                SYMBOLS => symbols = address,
                GNU_HASH => hashes = address,
                OLD_HASH => old_hash = address,
                VERSIONS => versions = address,
                _ => {}
            }
            // SAFETY: as above; this was not the last.
            entry = unsafe { entry.add(1) };
        }
        if strings == 0 || symbols == 0 || hashes == 0 && old_hash == 0 {
            return None;
        }
        let symbols_len = match old_hash {
            0 => 0,
            // SAFETY: the section begins with how many chains it has, after how many buckets: one for each symbol.
            section => unsafe { (section as *const [u32; 2]).read()[1] as usize },
        };
        Some(Names {
            base: self.base,
            symbols_len,
            strings: strings as *const c_char,
            symbols: symbols as *const Symbol,
            hashes: hashes as *const u32,
            versions: versions as *const u16,
        })
    }
}

#[repr(C)]
struct Symbol {
    name: u32,
    kind_and_binding: u8,
    visibility: u8,
    section: u16,
    value: u64,
    bytes: u64,
}

pub struct Names {
    base: usize,
    strings: *const c_char,
    symbols: *const Symbol,
    symbols_len: usize,
    /// The GNU hash section; null if there is none: then `symbols_len` is told.
    hashes: *const u32,
    /// A number for each symbol; null if the object has no versions.
    versions: *const u16,
}

pub const fn hash(name: &CStr) -> u32 {
    let bytes = name.to_bytes();
    let (mut hash, mut at) = (5381u32, 0);
    while at < bytes.len() {
        hash = hash.wrapping_mul(33).wrapping_add(bytes[at] as u32);
        at += 1;
    }
    hash
}

impl Names {
    pub fn function(&self, name: &CStr, hash: u32) -> Option<*mut c_void> {
        if self.hashes.is_null() {
            // SAFETY: the object has that many symbols.
            return (1..self.symbols_len).find_map(|at| unsafe { self.function_at(at, name) });
        }
        // SAFETY: the section is there.
        unsafe { self.hashed(name, hash) }
    }

    /// As [`Names::function`], by the GNU hash section.
    ///
    /// # Safety
    ///
    /// There is one.
    unsafe fn hashed(&self, name: &CStr, hash: u32) -> Option<*mut c_void> {
        const WORD_BITS: usize = u64::BITS as usize;
        let key = hash as usize;
        // SAFETY: the section has four numbers, then as many words of the filter as the third says, as many buckets as
        // the first says, and a hash for each symbol from the second on. A chain's last hash has its lowest bit set.
        unsafe {
            let [buckets_len, first, words, shift] =
                self.hashes.cast::<[u32; 4]>().read().map(|number| number as usize);
            if buckets_len == 0 || words == 0 {
                return None;
            }
            let filter = self.hashes.add(4).cast::<u64>();
            let bits = 1u64 << (key % WORD_BITS) | 1u64 << ((key >> shift) % WORD_BITS);
            if filter.add(key / WORD_BITS % words).read() & bits != bits {
                return None;
            }
            let buckets = filter.add(words).cast::<u32>();
            let chains = buckets.add(buckets_len);
            let mut at = buckets.add(key % buckets_len).read() as usize;
            while at >= first {
                let chained = chains.add(at - first).read();
                if chained | 1 == hash | 1
                    && let Some(found) = self.function_at(at, name)
                {
                    return Some(found);
                }
                if chained & 1 != 0 {
                    break;
                }
                at += 1;
            }
        }
        None
    }

    /// The symbol's address, if it is a function of that name, by default, in this object.
    ///
    /// # Safety
    ///
    /// The object has that many symbols.
    unsafe fn function_at(&self, at: usize, name: &CStr) -> Option<*mut c_void> {
        const UNTYPED: u8 = 0; // by an assembler that was not told; the dynamic linker takes it
        const FUNCTION: u8 = 2;
        const CHOSEN_BY_CALL: u8 = 10;
        const LOCAL: u8 = 0;
        const HIDDEN: u16 = 1 << 15;
        // SAFETY: by the caller there is such a symbol, with a name that ends, and its version if there are any.
        let (symbol, called, version) = unsafe {
            let symbol = &*self.symbols.add(at);
            let called = CStr::from_ptr(self.strings.add(symbol.name as usize));
            let version = if self.versions.is_null() { 0 } else { self.versions.add(at).read() };
            (symbol, called, version)
        };
        let (kind, binding) = (symbol.kind_and_binding & 0xf, symbol.kind_and_binding >> 4);
        if symbol.section == 0 || binding == LOCAL || version & HIDDEN != 0 || called != name {
            return None;
        }
        let address = self.base.wrapping_add(symbol.value as usize) as *mut c_void;
        match kind {
            UNTYPED | FUNCTION => Some(address),
            // SAFETY: it is a function that takes nothing and gives the address of the one to be called. The object is
            // relocated: it was loaded with the program, or code in it or above it calls this.
            CHOSEN_BY_CALL => Some(unsafe {
                core::mem::transmute::<*mut c_void, extern "C" fn() -> *mut c_void>(address)()
            })
            .filter(|chosen| !chosen.is_null()),
            _ => None,
        }
    }
}
