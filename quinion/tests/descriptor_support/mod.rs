//! What the tests of the hand-over of offsets share: one number of a program, with its calls, on a kernel that keeps an
//! offset for each description; and the check that a history of calls is one that the kernel alone could have given.
//!
//! ```text
//!   Program::call    what the wrappers of `frontends/preload` do for one call, in brief, by the real protocol
//!   Alone            the same calls on a kernel without Quinion
//!   History::check   is there an order of the calls, none moved before its begin or behind its end, in which
//!                    `Alone` gives the same answers and the same last offset?
//! ```
//!
//! The atomics are those of `quinion::sync`, so all of this runs under the model checker, too. A step of the kernel is
//! one step of a relaxed atomic: it promises an order of its own steps and nothing else.

#![allow(dead_code, reason = "each test uses its part")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64 as Count, Ordering::SeqCst};

use quinion::internals::fdstate::{CreditGiver, Fd, FdCell, FdState, FdWord, OFFSETS_MAX, Process};
use quinion::internals::sync::atomic::{AtomicU64, Ordering};

/// A call of the program's; those from `Attach` on are the owner's, and nothing to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// `read` of so many bytes; where they began, and in which file.
    Read(u64),
    /// `read` after `dup` or `fork`, by the second number or the child.
    DupRead(u64),
    /// `pread`; of which file.
    Pread,
    /// `write` of so many bytes by a descriptor that can; where they began.
    Write(u64),
    Set(u64),
    /// `lseek` from the offset on, inside the file.
    Skip(u64),
    /// `lseek` beyond the file's end, which only the kernel works out.
    SkipBeyond(u64),
    /// A call that looks at the kernel's offset: `lockf`.
    Peek,
    /// `close`, and `open` of the file of this number, which gets the same number. Files are opened once.
    Reopen(usize),
    /// The owner attaches a descriptor that cannot write.
    Attach,
    /// The owner attaches a descriptor that can write.
    AttachWriter,
    /// The first reads are the kernel's from now on: so many bytes.
    Credit(u64),
    /// The kernel serves the descriptor from now on.
    Detach,
    Share,
    /// An object is loaded: the kernel keeps the offset for a while.
    Pause,
}

/// The number of descriptions, and the distance between their answers.
pub const FILES: usize = 3;
const FILE: u64 = 1000;
/// In an answer: of two files.
const TORN: u64 = 900;
/// An answer: the number was closed.
const CLOSED: u64 = 999_999;

#[derive(Debug)]
struct Kernel {
    offsets: [AtomicU64; FILES],
    /// Changed by each step, so that the checker tries all orders of these. It is relaxed: it orders nothing else.
    turn: AtomicU64,
    /// The description behind the number; `None` if that never changes.
    behind: Option<AtomicU64>,
}

impl Kernel {
    fn file(&self) -> Option<usize> {
        let file = self.behind.as_ref().map_or(0, |behind| behind.fetch_add(0, Ordering::Relaxed) as usize);
        (file < FILES).then_some(file)
    }
    /// Moves the offset by `bytes`; where it was, and in which file.
    fn step(&self, bytes: u64) -> u64 {
        self.file().map_or(CLOSED, |file| self.step_in(file, bytes))
    }
    fn turn(&self) {
        self.turn.fetch_add(1, Ordering::Relaxed);
    }
    fn step_in(&self, file: usize, bytes: u64) -> u64 {
        self.turn();
        answer(file as u64, self.offsets[file].fetch_add(bytes, Ordering::Relaxed))
    }
    fn set(&self, offset: u64) {
        self.turn();
        if let Some(file) = self.file() {
            self.offsets[file].swap(offset, Ordering::Relaxed);
        }
    }
    fn reopen(&self, file: usize) {
        let behind = self.behind.as_ref().expect("a program that opens others");
        behind.swap(FILES as u64, Ordering::Relaxed); // closed
        behind.swap(file as u64, Ordering::Relaxed);
    }
}

fn answer(file: u64, offset: u64) -> u64 {
    file * FILE + offset
}

#[derive(Debug)]
pub struct Program {
    cell: FdCell,
    kernel: Kernel,
    /// What the number is attached to: the owner's handle, and the file, plus one.
    handle: AtomicU64,
    attached: AtomicU64,
    forks: AtomicU64,
    handles: Count,
    in_use: Mutex<Vec<u64>>,
    clock: Count,
    done: Mutex<Vec<Done>>,
}

#[derive(Clone, Copy, Debug)]
struct Done {
    call: Call,
    answer: u64,
    from: u64,
    to: u64,
}

struct Ours<'a>(&'a Program);

impl Process for Ours<'_> {
    type SignalsHeld = ();
    fn hold_signals(&self) {}
    fn offset(&self) -> Option<u64> {
        self.0.kernel.file().map(|file| self.0.kernel.step_in(file, 0) % FILE)
    }
    fn set_offset(&self, offset: u64) {
        self.0.kernel.set(offset);
    }
    fn wait(&self, _: u32) {
        #[cfg(quinion_model)]
        loom::thread::yield_now();
        #[cfg(not(quinion_model))]
        std::thread::yield_now();
    }
    fn handle(&self) -> u64 {
        self.0.handle.load(Ordering::Relaxed)
    }
}

impl Program {
    /// A program that has opened file 0 for reading. Whether it will open others by this number.
    pub fn new(reopens: bool) -> Self {
        let program = Self {
            cell: FdCell::new(),
            kernel: Kernel {
                turn: AtomicU64::new(0),
                offsets: std::array::from_fn(|_| AtomicU64::new(0)),
                behind: reopens.then(|| AtomicU64::new(0)),
            },
            handle: AtomicU64::new(0),
            attached: AtomicU64::new(0),
            forks: AtomicU64::new(0),
            handles: Count::new(0),
            in_use: Mutex::new(Vec::new()),
            clock: Count::new(0),
            done: Mutex::new(Vec::new()),
        };
        program.opened(0);
        program
    }

    fn fd(&self) -> Fd<'_, Ours<'_>> {
        Fd::new(&self.cell, Ours(self))
    }

    pub fn state(&self) -> FdState {
        self.cell.load().state()
    }

    pub fn call(&self, call: Call) -> u64 {
        let from = self.clock.fetch_add(1, SeqCst); // not of the checker's: it orders nothing there
        self.kernel.turn();
        let answer = self.answer(call);
        let to = self.clock.fetch_add(1, SeqCst); // as above
        self.done.lock().unwrap().push(Done { call, answer, from, to });
        answer
    }

    fn answer(&self, call: Call) -> u64 {
        match call {
            Call::Read(bytes) => self.read(bytes),
            Call::DupRead(bytes) => {
                self.fd().share();
                self.kernel.step(bytes)
            }
            Call::Pread => self.pread(),
            Call::Write(bytes) => self.kernel.step(bytes),
            Call::Set(to) => self.seek(|_| Some(to), || self.kernel.set(to), |_| to),
            Call::Skip(by) => self.seek(|now| Some(now + by), || {}, |this| this.kernel.step(by) % FILE + by),
            Call::SkipBeyond(by) => self.seek(|_| None, || {}, |this| this.kernel.step(by) % FILE + by),
            Call::Peek => {
                self.fd().show_offset();
                self.kernel.step(0)
            }
            Call::Reopen(file) => {
                self.give_back(self.fd().forget());
                self.kernel.reopen(file);
                self.opened(self.forks.fetch_add(0, Ordering::AcqRel)); // partner: itself, in `fork`
                0
            }
            Call::Credit(bytes) => {
                let word = self.fd().settled();
                let _ = word.state() == FdState::Candidate
                    && self.cell.give_credit(word, bytes, CreditGiver::Viewer);
                0
            }
            Call::Attach | Call::AttachWriter => {
                let word = self.fd().settled();
                self.attach(word, call == Call::AttachWriter);
                0
            }
            Call::Detach => {
                self.give_back(self.fd().detach().flatten());
                0
            }
            Call::Share => {
                self.fd().share();
                0
            }
            Call::Pause => {
                self.give_back(self.fd().pause());
                0
            }
        }
    }

    fn opened(&self, forks: u64) {
        self.opened_meanwhile(forks, || {});
    }

    /// The number was opened by a call before which so many forks had begun. `meanwhile` comes before the look for
    /// more.
    pub fn opened_meanwhile(&self, forks: u64, meanwhile: impl FnOnce()) {
        let is_alone = || {
            meanwhile();
            // AcqRel, partner: itself, in `fork`. The real ones are SeqCst loads and additions; in the checker only a
            // step of both kinds is sure to see the last.
            forks == 0 && self.forks.fetch_add(0, Ordering::AcqRel) == forks
        };
        let opened = self.fd().open_for_reading(is_alone);
        assert_eq!(opened.stale, None, "wrong: it was closed before");
    }

    /// What `fork` does before there is a child; then the child reads. It is under way for ever, as an `exec` is that
    /// succeeds: what is opened from then on is the next program's too.
    pub fn fork(&self, bytes: u64) -> u64 {
        self.forks.fetch_add(1, Ordering::AcqRel); // partner: itself, in `opened`
        self.call(Call::DupRead(bytes))
    }

    /// Opens the number for the first time, whatever else is under way: as [`Self::opened_meanwhile`], by what is known
    /// of forks before the call.
    pub fn open(&self) {
        self.opened(self.forks.fetch_add(0, Ordering::AcqRel)); // partner: itself, in `fork`
    }

    /// The number is not in the table yet, although the kernel has opened it.
    pub fn unopened() -> Self {
        let program = Self::new(false);
        assert_eq!(program.fd().forget(), None);
        program
    }

    fn read(&self, bytes: u64) -> u64 {
        // A read that the kernel makes without its being counted may reach the next file, if the number is closed and
        // opened anew meanwhile, or is read before its opening has returned. That race is the program's own and is not
        // looked at: such a read is of the file that is there now, and of the first if the number is not in the table.
        let meant = self.kernel.file();
        loop {
            let word = self.fd().settled();
            match word.state() {
                FdState::Served => {
                    let file = self.copy();
                    if self.cell.advance(word, word.offset() + bytes) {
                        return answer(file, word.offset());
                    }
                }
                FdState::Candidate if word.credit() == Some(0) && !word.has_kernels_calls() => {
                    self.attach(word, false);
                }
                _ => {
                    if self.fd().begin_kernels_call(bytes) {
                        let answer = self.kernel.step(bytes);
                        self.fd().end_kernels_call();
                        return answer;
                    }
                    self.fd().share();
                    let is_open = word.state() != FdState::Unknown && self.state() != FdState::Unknown;
                    let meant = meant.filter(|&file| is_open || file == 0);
                    return meant.map_or(CLOSED, |file| self.kernel.step_in(file, bytes));
                }
            }
        }
    }

    fn pread(&self) -> u64 {
        loop {
            let word = self.fd().settled();
            if !word.state().is_attached() {
                return self.kernel.file().map_or(CLOSED, |file| answer(file as u64, 0));
            }
            let file = self.copy();
            if self.cell.is_still(word) {
                return answer(file, 0);
            }
        }
    }

    /// Copies, in two parts; returns from which file.
    fn copy(&self) -> u64 {
        let [first, second] = [(); 2].map(|()| self.attached.load(Ordering::Relaxed));
        let is_whole = first == second && first != 0;
        if is_whole { first - 1 } else { TORN }
    }

    /// A seek: `inside` says where it leads from a private offset, if that is known; else the kernel does, `prepared`
    /// and then asked by `ask`.
    fn seek(
        &self,
        inside: impl Fn(u64) -> Option<u64>,
        prepare: impl Fn(),
        ask: impl Fn(&Self) -> u64,
    ) -> u64 {
        let ask = || -> Result<u64, ()> {
            prepare();
            Ok(ask(self))
        };
        loop {
            let word = self.fd().settled();
            match word.state() {
                FdState::Served => match inside(word.offset()) {
                    Some(to) if self.cell.advance(word, to) => return to,
                    Some(_) => {}
                    None => {
                        if let Some(Ok(now)) = self.fd().seek(word, ask) {
                            return now;
                        }
                    }
                },
                FdState::Candidate => {
                    if let Some(Ok(now)) = self.fd().seek(word, ask) {
                        return now;
                    }
                }
                _ => {
                    self.fd().share();
                    return ask().unwrap();
                }
            }
        }
    }

    fn attach(&self, word: FdWord, can_write: bool) {
        if !matches!(word.state(), FdState::Candidate | FdState::Shared) {
            return;
        }
        let Some(file) = self.kernel.file() else { return };
        let handle = self.handles.fetch_add(1, SeqCst) + 1; // as in `call`
        self.in_use.lock().unwrap().push(handle);
        let published = self.fd().publish(word, can_write, || {
            self.handle.store(handle, Ordering::Relaxed);
            self.attached.store(file as u64 + 1, Ordering::Relaxed);
        });
        if published.is_none() {
            self.give_back(Some(handle));
        }
    }

    fn give_back(&self, handle: Option<u64>) {
        let Some(handle) = handle else { return };
        let mut in_use = self.in_use.lock().unwrap();
        let at = in_use.iter().position(|&used| used == handle);
        assert!(at.is_some(), "wrong: handle {handle} is given back twice");
        in_use.remove(at.unwrap());
    }

    pub fn check(&self) {
        self.fd().share();
        let last = self.kernel.step(0);
        self.give_back(self.fd().forget());
        assert!(self.in_use.lock().unwrap().is_empty(), "wrong: a handle was not given back");
        let mut done = self.done.lock().unwrap().clone();
        done.sort_by_key(|done| done.from);
        assert!(
            is_possible(&done, &mut vec![false; done.len()], Alone::default(), last),
            "wrong history: {done:?}, at last {last}"
        );
    }
}

#[derive(Clone, Copy, Default, Debug)]
pub struct Alone {
    file: u64,
    offset: u64,
}

impl Alone {
    pub fn answer(&mut self, call: Call) -> u64 {
        match call {
            Call::Read(bytes) | Call::DupRead(bytes) | Call::Write(bytes) => {
                self.offset += bytes;
                answer(self.file, self.offset - bytes)
            }
            Call::Pread => answer(self.file, 0),
            Call::Peek => answer(self.file, self.offset),
            Call::Set(to) => {
                self.offset = to;
                to
            }
            Call::Skip(by) | Call::SkipBeyond(by) => {
                self.offset += by;
                self.offset
            }
            Call::Reopen(file) => {
                *self = Self { file: file as u64, offset: 0 };
                0
            }
            _ => 0,
        }
    }
}

/// Whether the calls that are not `taken` can follow in some order.
fn is_possible(done: &[Done], taken: &mut [bool], alone: Alone, last: u64) -> bool {
    let left = || done.iter().zip(taken.iter()).filter(|(_, taken)| !**taken).map(|(done, _)| done);
    let Some(first_end) = left().map(|done| done.to).min() else {
        return answer(alone.file, alone.offset) == last;
    };
    for at in 0..done.len() {
        if taken[at] || done[at].from > first_end {
            continue;
        }
        let mut next = alone;
        if done[at].answer != CLOSED && next.answer(done[at].call) != done[at].answer {
            continue;
        }
        taken[at] = true;
        let possible = is_possible(done, taken, next, last);
        taken[at] = false;
        if possible {
            return true;
        }
    }
    false
}

const _: () = assert!(FILE < OFFSETS_MAX);
