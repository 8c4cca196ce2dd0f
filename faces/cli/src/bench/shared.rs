//! Shared: what all cases of an experiment use, made when the first of them is prepared.
//!
//! It goes away with the last of the cases. If it cannot be made, that is not tried again.

use std::cell::OnceCell;
use std::rc::Rc;

use super::harness::{Settings, Unmeasured};

/// Something that is made at most once.
pub struct Shared<T> {
    settings: Settings,
    make: fn(&Settings) -> Result<T, Unmeasured>,
    made: Rc<OnceCell<Result<Rc<T>, Unmeasured>>>,
}

impl<T> Shared<T> {
    /// What `make` makes, if somebody asks for it.
    pub fn new(settings: &Settings, make: fn(&Settings) -> Result<T, Unmeasured>) -> Self {
        Self { settings: settings.clone(), make, made: Rc::default() }
    }

    /// It, or why there is none.
    pub fn get(&self) -> Result<Rc<T>, Unmeasured> {
        self.made.get_or_init(|| (self.make)(&self.settings).map(Rc::new)).clone()
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self { settings: self.settings.clone(), make: self.make, made: Rc::clone(&self.made) }
    }
}
