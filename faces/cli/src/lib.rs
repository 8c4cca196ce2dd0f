//! The parts of the command `quinion`, as a library for its own tests. No promise is made about it.

pub mod run;
