//! The command `quinion`.

fn main() {}
