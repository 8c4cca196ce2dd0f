//! Tuning: how a cache works inside, as words of a command line.
//!
//! ```text
//!   --tuning insertion=one-by-one,descent=naive
//! ```
//!
//! What each choice means stands in the library's `Tuning`. Nobody needs one to
//! run a program; a benchmark that asks what a mechanism is worth does.

use quinion::{Descent, Insertion, Tuning};

/// The choices of `text`, which are separated by commas; those that are not named are as usual.
pub fn parse(text: &str) -> Result<Tuning, String> {
    text.split(',').try_fold(Tuning::default(), |tuning, choice| match choice {
        "insertion=batched" => Ok(tuning.insertion(Insertion::Batched)),
        "insertion=one-by-one" => Ok(tuning.insertion(Insertion::OneByOne)),
        "descent=single" => Ok(tuning.descent(Descent::Single)),
        "descent=naive" => Ok(tuning.descent(Descent::Naive)),
        _ => Err(format!(
            "`{choice}` is not a choice; write insertion=batched, insertion=one-by-one, descent=single or \
             descent=naive, with commas between them"
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_taken_and_what_is_none_is_refused() {
        assert_eq!(parse("insertion=batched,descent=single"), Ok(Tuning::default()));
        let other = Tuning::default().insertion(Insertion::OneByOne).descent(Descent::Naive);
        assert_eq!(parse("insertion=one-by-one,descent=naive"), Ok(other));
        for wrong in ["", "insertion", "insertion=two", "descent=single,"] {
            assert!(parse(wrong).is_err_and(|why| why.contains("one-by-one")), "{wrong}");
        }
    }
}
