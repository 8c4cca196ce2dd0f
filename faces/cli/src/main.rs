//! The command `quinion`: cat, stat and run through a page cache you own.
//!
//! This face holds no policy. What it decides is how words of a command line
//! become calls of the library, and how answers become lines.

fn main() {}
