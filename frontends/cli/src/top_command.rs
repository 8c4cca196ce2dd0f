//! Top: the command that shows what a running `quinion serve` does.
//!
//! On a terminal it draws until it is interrupted; with `--json`, or where standard output is no terminal, it prints
//! the numbers once and ends.

use std::io::{IsTerminal, stdout};
use std::process::ExitCode;

use quinion_cli::top::{self, Monitor};
use quinion_run::report::Form;

use crate::{complain, print};

/// Show what a running `quinion serve` does: hits, bytes, GETs saved and their price, memory, the disk tier, and each
/// store with the times of its answers. In a terminal's last rows until it is interrupted; once, if the output goes
/// elsewhere.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Print one line of JSON, and end.
    #[arg(long)]
    json: bool,
    /// Where the server answers monitors, as its `--metrics` says.
    #[arg(value_name = "ADDRESS", default_value = "127.0.0.1:9464")]
    address: String,
}

pub fn main(arguments: &Arguments) -> ExitCode {
    let monitor = Monitor::new(&arguments.address);
    let sample = match monitor.ask() {
        Ok(sample) => sample,
        Err(why) => return complain(&why),
    };
    let form = if arguments.json { Form::Json } else { Form::Text };
    if !arguments.json && stdout().is_terminal() {
        top::watch(&monitor, sample.clone()); // it returns where no panel can be drawn
    }
    print(&top::printed(&monitor, &sample, form)).map_or_else(|code| code, |()| ExitCode::SUCCESS)
}
