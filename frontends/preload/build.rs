//! Says how the object is linked: its own functions are its own. Nothing is built or looked for here. A test of the
//! command, which carries the object, checks that it exports what it should, and no more, and that its wrappers are
//! reached.

fn main() {
    // The object takes the addresses of its own wrappers, to send the C library's callers there. Without this a
    // function of the same name in an object before it would be meant.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo::rerun-if-changed=build.rs");
}
