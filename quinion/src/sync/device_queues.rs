//! Device queues: work that waits for a thread, in a queue for each device, so that one that hangs keeps its share of
//! the threads and no more.
//!
//! ```text
//!   push --> the device's queue     ready: A B A C      begin --> a thread does it --> end: one more of it is ready
//!                  |                         ^
//!                  +-- fewer at work and ready than a device may have: it is named once more
//! ```
//!
//! A device answers all, or none: a file system of a network whose server is gone holds each thread that asks it for
//! something. New work for it waits behind the work that waits already, and other devices' work is done.
//!
//! Invariant: `ready` names a device once for each piece of its work that waits and may begin, and no more often.

use std::collections::{BTreeMap, VecDeque};

/// Work of all devices; see the head of this file.
#[derive(Debug)]
pub struct DeviceQueues<T> {
    devices: BTreeMap<u64, DeviceQueue<T>>,
    ready: VecDeque<u64>,
    /// How many threads one device may keep.
    at_once_max: usize,
}

#[derive(Debug)]
struct DeviceQueue<T> {
    waiting: VecDeque<T>,
    running: usize,
    /// How often `ready` names the device.
    ready: usize,
}

impl<T> DeviceQueues<T> {
    /// No work, of which `at_once_max` pieces of one device may be under way at a time, at least 1.
    pub fn new(at_once_max: usize) -> Self {
        Self { devices: BTreeMap::new(), ready: VecDeque::new(), at_once_max: at_once_max.max(1) }
    }

    /// Adds `work`, after what `device` has already.
    pub fn push(&mut self, device: u64, work: T) {
        let new = || DeviceQueue { waiting: VecDeque::new(), running: 0, ready: 0 };
        self.devices.entry(device).or_insert_with(new).waiting.push_back(work);
        self.admit(device);
    }

    /// Takes the last work that was pushed for `device` back, if it has not begun.
    pub fn take_back(&mut self, device: u64) -> Option<T> {
        let queue = self.devices.get_mut(&device)?;
        let work = queue.waiting.pop_back();
        if queue.ready > queue.waiting.len() {
            queue.ready -= 1;
            let named = self.ready.iter().rposition(|ready| *ready == device).expect("it is counted");
            self.ready.remove(named);
        }
        self.forget_unused(device);
        work
    }

    /// How many pieces of work may begin now.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// How much work of `device` waits or is under way.
    pub fn outstanding(&self, device: u64) -> usize {
        self.devices.get(&device).map_or(0, |queue| queue.waiting.len() + queue.running)
    }

    /// The work that is next, and its device; [`Self::end`] is to be called when it is done.
    pub fn begin(&mut self) -> Option<(u64, T)> {
        let device = self.ready.pop_front()?;
        let queue = self.devices.get_mut(&device).expect("a ready device has work");
        queue.ready -= 1;
        queue.running += 1;
        Some((device, queue.waiting.pop_front().expect("a ready device has work")))
    }

    /// Work of `device` that was begun has ended.
    pub fn end(&mut self, device: u64) {
        self.devices.get_mut(&device).expect("work that was begun is counted").running -= 1;
        self.admit(device);
        self.forget_unused(device);
    }

    fn admit(&mut self, device: u64) {
        let queue = self.devices.get_mut(&device).expect("its caller has looked at it");
        if queue.ready < queue.waiting.len() && queue.running + queue.ready < self.at_once_max {
            queue.ready += 1;
            self.ready.push_back(device);
        }
    }

    fn forget_unused(&mut self, device: u64) {
        if self.devices.get(&device).is_some_and(|queue| queue.waiting.is_empty() && queue.running == 0) {
            self.devices.remove(&device);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Act {
        Push(u64),
        TakeBack(u64),
        Begin,
        /// Ends a piece of the work under way, by number.
        End(usize),
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            4 => (0..3_u64).prop_map(Act::Push),
            1 => (0..3_u64).prop_map(Act::TakeBack),
            3 => Just(Act::Begin),
            3 => (0..9_usize).prop_map(Act::End),
        ];
        prop::collection::vec(act, 1..200)
    }

    proptest! {
        /// Beside three plain queues: what may begin is in order, never too much of one device, and all there is.
        #[test]
        fn each_device_has_its_order_and_its_share(acts in acts(), at_once_max in 1..4_usize) {
            let mut queues = DeviceQueues::new(at_once_max);
            let (mut waiting, mut running) = ([(); 3].map(|()| VecDeque::new()), Vec::new());
            for (number, act) in acts.into_iter().enumerate() {
                match act {
                    Act::Push(device) => {
                        queues.push(device, number);
                        waiting[device as usize].push_back(number);
                    }
                    Act::TakeBack(device) => {
                        prop_assert_eq!(queues.take_back(device), waiting[device as usize].pop_back());
                    }
                    Act::Begin => if let Some((device, work)) = queues.begin() {
                        prop_assert_eq!(waiting[device as usize].pop_front(), Some(work));
                        running.push(device);
                    },
                    Act::End(nth) if !running.is_empty() => queues.end(running.remove(nth % running.len())),
                    Act::End(_) => {}
                }
                let may_begin = (0..3).map(|device| {
                    let at_work = running.iter().filter(|running| **running == device as u64).count();
                    assert!(at_work <= at_once_max);
                    waiting[device].len().min(at_once_max - at_work)
                });
                prop_assert_eq!(queues.ready(), may_begin.sum::<usize>());
                let outstanding: usize = (0..3).map(|device| queues.outstanding(device)).sum();
                prop_assert_eq!(outstanding, running.len() + waiting.iter().map(VecDeque::len).sum::<usize>());
            }
            let is_idle = running.is_empty() && waiting.iter().all(VecDeque::is_empty);
            prop_assert!(!is_idle || queues.devices.is_empty(), "an idle device is forgotten");
        }
    }
}
