//! Requests: a worker has a request answered that it took, and writes the answer into the viewer's page.
//!
//! ```text
//!   PENDING --take--> TAKEN --answer--> DONE      the viewer that waits is woken
//!      ^                |  '-----------> FREE     no thread waits for it: what it was given is taken back
//!      '---put back-----'
//! ```
//!
//! How a request is taken and put back is in `pending_requests.rs`. The viewer slot stays busy until the answer is
//! written. Some workers at most work for one viewer, or for one file system (`workers.rs`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Shared;
use super::owner::{Caching, WatchingProcess, WriterAccess};
use super::viewer_slot::ViewerJob;
use super::workers::WorkKey;
use crate::sys::serial_queues::QueueKey;
use crate::viewer::sys::{Errno, futex_wake};
use quinion::internals::arena::control::{Advice, Operation, Request, SyscallAudit, UNCACHED, state};
use quinion::internals::sync::contained;
use quinion::internals::units::{FileId, PageIndex};

impl Shared {
    /// One that must not be refused, and whose file system hangs, is done in the queue of that.
    pub(super) fn do_job_or_defer(self: &Arc<Self>, job: ViewerJob) {
        match job.device_to_notify().filter(|&device| self.workers.is_stuck(WorkKey::Notices(device))) {
            Some(device) => {
                let shared = Arc::clone(self);
                self.queues.spawn(QueueKey::Device(device), move || shared.do_job(&job));
            }
            None => self.do_job(&job),
        }
    }

    pub(super) fn do_job(&self, job: &ViewerJob) {
        // The viewer's reads since its last request are noted before room is made for more.
        self.viewers.drain_ring(job.viewer);
        let result = contained(|| self.answer(job)).unwrap_or(Err(Errno::IO));
        let request = &self.viewers.page(job.viewer).requests[job.request_slot];
        // Before the viewer that asked is told, and may ask again by the same slot; the viewer slot stays busy.
        self.viewers.slot(job.viewer).lock().jobs[job.request_slot] = None;
        if write_answer(request, job.attended, result) == AnswerDelivery::NotAwaited
            && let Ok([number, _]) = result
        {
            self.take_back(job, number); // no process knows of it
        }
        self.viewers.slot(job.viewer).lock().busy -= 1;
        if job.operation == Operation::Attach as u32 {
            contained(|| self.owner.prepare(self));
        }
    }

    /// The handle or the pin of that `number`: its viewer does not read the answer.
    fn take_back(&self, job: &ViewerJob, number: u64) {
        const ATTACH: u32 = Operation::Attach as u32;
        const OPEN_NAMED: u32 = Operation::OpenNamed as u32;
        const PIN: u32 = Operation::Pin as u32;
        match job.operation {
            ATTACH | OPEN_NAMED if number != 0 => self.handles.detach(job.viewer, number),
            PIN => self.pins.unpin(job.viewer, job.arguments[0], number),
            _ => {}
        }
    }

    fn work_key(&self, job: &ViewerJob) -> Result<Option<WorkKey>, Errno> {
        const ATTACH: u32 = Operation::Attach as u32;
        const OPEN_NAMED: u32 = Operation::OpenNamed as u32;
        const EXAMINE: u32 = Operation::Examine as u32;
        const UNPIN: u32 = Operation::Unpin as u32;
        const WRITER_OPENED: u32 = Operation::WriterOpened as u32;
        const LET_GO: u32 = Operation::LetGo as u32;
        const RELEASE: u32 = Operation::Release as u32;
        const REMOVES: u32 = Operation::Removes as u32;
        let [first, ..] = job.arguments;
        match job.operation {
            ATTACH | OPEN_NAMED | EXAMINE => Ok(None), // they count by themselves
            UNPIN => Ok(None), // it asks no store, and one that was refused would leave a pin
            RELEASE => Ok(Some(WorkKey::Closes)),
            WRITER_OPENED | LET_GO | REMOVES => Ok(Some(WorkKey::Notices(first))),
            _ => match self.viewers.slot(job.viewer).lock().handles.get(&first) {
                Some(handle) => Ok(Some(WorkKey::Files(handle.device))),
                None => Err(Errno::BADF),
            },
        }
    }

    fn answer(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        const ATTACH: u32 = Operation::Attach as u32;
        const FILL: u32 = Operation::Fill as u32;
        const ADVANCE: u32 = Operation::Advance as u32;
        const REVALIDATE: u32 = Operation::Revalidate as u32;
        const DETACH: u32 = Operation::Detach as u32;
        const EXAMINE: u32 = Operation::Examine as u32;
        const WRITER_OPENED: u32 = Operation::WriterOpened as u32;
        const LET_GO: u32 = Operation::LetGo as u32;
        const RELEASE: u32 = Operation::Release as u32;
        const REMOVES: u32 = Operation::Removes as u32;
        const HINT: u32 = Operation::Hint as u32;
        const OPEN_NAMED: u32 = Operation::OpenNamed as u32;
        const PIN: u32 = Operation::Pin as u32;
        const UNPIN: u32 = Operation::Unpin as u32;
        let [first, second, third] = job.arguments;
        let key = self.work_key(job)?;
        let at_work = key.map(|key| self.workers.enter(key).ok_or(Errno::AGAIN));
        let _at_work = match at_work {
            // It is not refused, and waits in the queue of its file system.
            Some(Err(_)) if job.operation == DETACH => {
                self.handles.detach_in_queue(job.viewer, first);
                return Ok([0, 0]);
            }
            Some(Err(_)) if job.device_to_notify().is_some() => None, // see `do_job_or_defer`
            at_work => at_work.transpose()?,
        };
        match job.operation {
            ATTACH => self.attach(job, first, FileId { device: second, inode: third }),
            OPEN_NAMED => self.open_named(job, first),
            PIN | UNPIN => self.pins.answer(job),
            EXAMINE => self.examine(job),
            FILL => self.owner.fill(first, second, third & !UNCACHED, caching_of(third)).map(|()| [0, 0]),
            REVALIDATE => self.owner.revalidate(first).map(|size| [size, 0]),
            ADVANCE => {
                self.owner.advance(first, PageIndex(second & !UNCACHED), caching_of(second));
                Ok([0, 0])
            }
            HINT => {
                let (advice, len) = Advice::and_length(third).ok_or(Errno::INVAL)?;
                self.owner.advise(first, advice, second, len).map(|()| [0, 0])
            }
            DETACH => {
                self.handles.detach(job.viewer, first);
                Ok([0, 0])
            }
            WRITER_OPENED => {
                let access = if third == 0 { WriterAccess::Write } else { WriterAccess::Truncate };
                self.owner.writer_opened(FileId { device: first, inode: second }, access);
                Ok([0, 0])
            }
            RELEASE => {
                self.release_idle();
                Ok([0, 0])
            }
            REMOVES => {
                self.close_idle(FileId { device: first, inode: second });
                Ok([0, 0])
            }
            LET_GO => self.revoke_for_viewer(job),
            _ => Err(Errno::INVAL),
        }
    }

    /// A viewer wants to be alone with a file, or is about to watch it.
    fn revoke_for_viewer(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        let [device, inode, watches] = job.arguments;
        let id = FileId { device, inode };
        if watches == 0 {
            self.owner.revoke(id);
        } else {
            let watcher = WatchingProcess { name: job.process.name, alive: Arc::clone(&job.process.alive) };
            self.owner.watched(id, &watcher);
        }
        Ok([0, 0])
    }

    fn examine(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        let _probe = self.workers.probe(job.process.name).ok_or(Errno::AGAIN)?;
        if !self.domain.has(&job.process.member) {
            return Err(Errno::ACCES);
        }
        let examine = self.examiner.as_ref();
        let audit = examine.map_or(SyscallAudit::Restricted, |examine| examine(job.process.number));
        Ok([audit as u64, 0])
    }
}

fn caching_of(argument: u64) -> Caching {
    if argument & UNCACHED == 0 { Caching::Cached } else { Caching::Uncached }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AnswerDelivery {
    Delivered,
    NotAwaited,
}

/// If no thread waits for the request, only the slot is freed.
fn write_answer(request: &Request, attended: bool, result: Result<[u64; 2], Errno>) -> AnswerDelivery {
    if attended {
        match result {
            Ok(answers) => {
                request.error.store(0, Ordering::Relaxed);
                for (place, answer) in request.answers.iter().zip(answers) {
                    place.store(answer, Ordering::Relaxed);
                }
            }
            Err(error) => request.error.store(error.0 as u32, Ordering::Relaxed),
        }
        // SeqCst on both, partner: `wait` in the viewer, which says it sleeps and then looks at the state.
        let done =
            request.state.compare_exchange(state::TAKEN, state::DONE, Ordering::SeqCst, Ordering::Relaxed);
        if done.is_ok() {
            if request.sleeper.load(Ordering::SeqCst) != 0 {
                futex_wake(&request.state, 1);
            }
            return AnswerDelivery::Delivered;
        }
        // Given up meanwhile.
    }
    // Release, partner: the Acquire by which a viewer claims the slot.
    request.state.store(state::FREE, Ordering::Release);
    AnswerDelivery::NotAwaited
}
