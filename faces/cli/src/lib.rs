//! The parts of the command `quinion` that its own tests look into.
//!
//! The command is a program and not a library: no promise is made about
//! anything here, and nothing but `faces/cli` may name it. What is in it is
//! [`run`], whose [`Session`](run::Session) the tests start with an owner of
//! their own, to see that programs print the same with a cache and without, and
//! what `run` shares with the other verbs.

pub mod elf;
pub mod report;
pub mod run;
pub mod size;
