//! Tasks: futures on this thread, until all of them are done.
//!
//! The least that a runtime can be: it polls what was woken, and else the thread sleeps. A thread that wakes a task
//! puts its number into a list and wakes the thread.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

/// Tasks that have something to do, and the thread that does it.
struct Woken {
    tasks: Mutex<Vec<usize>>,
    thread: Thread,
}

struct TaskWaker {
    task: usize,
    woken: Arc<Woken>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(self.task);
        self.woken.thread.unpark();
    }
}

/// Polls `tasks` until each is done; returns their results, in their order.
pub fn run_all<F: Future>(tasks: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut tasks: Vec<Option<Pin<Box<F>>>> = tasks.map(|task| Some(Box::pin(task))).collect();
    let mut answers: Vec<Option<F::Output>> = tasks.iter().map(|_| None).collect();
    let all: Vec<usize> = (0..tasks.len()).collect();
    let woken = Arc::new(Woken { tasks: Mutex::new(all.clone()), thread: thread::current() });
    let waker = |task| Waker::from(Arc::new(TaskWaker { task, woken: Arc::clone(&woken) }));
    let wakers: Vec<Waker> = all.into_iter().map(waker).collect();
    let mut ready = Vec::new();
    while answers.iter().any(Option::is_none) {
        std::mem::swap(&mut ready, &mut woken.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        if ready.is_empty() {
            thread::park();
        }
        for task in ready.drain(..) {
            let Some(future) = &mut tasks[task] else { continue };
            if let Poll::Ready(answer) = future.as_mut().poll(&mut Context::from_waker(&wakers[task])) {
                (answers[task], tasks[task]) = (Some(answer), None);
            }
        }
    }
    answers.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_that_others_wake_end_in_their_own_time() {
        let task = |number: u32| async move {
            let mut rounds = 0;
            std::future::poll_fn(|context| {
                rounds += 1;
                let waker = context.waker().clone();
                thread::spawn(move || waker.wake());
                if rounds > number { Poll::Ready(number) } else { Poll::Pending }
            })
            .await
        };
        assert_eq!(run_all((0..5).map(task)), [0, 1, 2, 3, 4]);
        assert_eq!(run_all(std::iter::empty::<std::future::Ready<()>>()), []);
    }
}
