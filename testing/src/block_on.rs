//! Block on: waits for one future on the calling thread.
//!
//! It polls when it was woken, and else sleeps: a wake-up that is lost is a test that hangs.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};

/// Wakes a thread.
pub struct Unpark(pub Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for the future, and returns its output.
pub fn block_on<F: Future>(future: F) -> F::Output {
    block_on_while(future, || ())
}

/// As [`block_on`]; `waiting` is called before each sleep.
pub fn block_on_while<F: Future>(future: F, waiting: impl Fn()) -> F::Output {
    let (mut future, waker) = (pin!(future), Arc::new(Unpark(thread::current())).into());
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => {
                waiting();
                thread::park();
            }
        }
    }
}
