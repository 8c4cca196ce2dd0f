//! Opening: what a store reads before it is there, from a disk that may not answer.
//!
//! A call that waits for a broken disk cannot be ended from outside. So each runs on a thread that has nothing of its
//! caller's, as reads do later (`reads.rs`): the opener waits for an answer for a while, and leaves the thread behind.
//! It also gives up a disk that refuses some tables; a slow one has a minute, and the store goes on without the rest.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::device::{AlignedBuffer, Device};
use crate::error::DiskError;
use crate::layout::{PAGE_BYTES, Superblock, SuperblockState, TABLE_PAGES, Table, segment_start};
use crate::reads::{PIECES, READ_ERRORS_MAX};

const THREADS: u32 = 4;
/// The time that tables are read for.
const TABLES_MAX: Duration = Duration::from_secs(60);

/// How a disk is asked: how long an answer is waited for, and what each thread calls first.
#[derive(Clone, Copy)]
pub struct Asker {
    pub answer_max: Duration,
    pub on_start: fn(),
}

impl Asker {
    /// The answer of `ask`, which runs on a thread of its own; `None` if there is none in time.
    pub fn ask<T: Send + 'static>(self, ask: impl FnOnce() -> T + Send + 'static) -> io::Result<Option<T>> {
        let (answers, received) = channel();
        self.spawn(move || {
            let _ = answers.send(ask()); // the opener may have given up
        })?;
        match self.receive(&received) {
            Ok(answer) => Ok(Some(answer)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("the disk's thread panicked")),
        }
    }

    fn spawn(self, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let thread = std::thread::Builder::new().name("quinion-disk".to_owned());
        thread.spawn(move || {
            (self.on_start)();
            run();
        })?;
        Ok(())
    }

    /// The time counts in pieces, of which a process that was stopped meanwhile has missed one.
    fn receive<T>(self, answers: &Receiver<T>) -> Result<T, RecvTimeoutError> {
        for _ in 1..PIECES {
            match answers.recv_timeout(self.answer_max / PIECES) {
                Err(RecvTimeoutError::Timeout) => {}
                received => return received,
            }
        }
        answers.recv_timeout(self.answer_max / PIECES)
    }

    pub fn no_answer(self) -> io::Error {
        io::Error::new(io::ErrorKind::TimedOut, format!("no answer for {:?}", self.answer_max))
    }
}

fn failed(action: &'static str) -> impl FnOnce(io::Error) -> DiskError {
    move |source| DiskError::Device { action, source }
}

/// The identifier of the store, from the superblock that is there or is made now.
pub fn read_superblock(asker: Asker, device: &Arc<dyn Device>) -> Result<u64, DiskError> {
    let device = Arc::clone(device);
    let answer =
        asker.ask(move || read_or_make_superblock(&*device)).map_err(failed("start a thread for"))?;
    answer.unwrap_or_else(|| Err(failed("read the start of")(asker.no_answer())))
}

fn read_or_make_superblock(device: &dyn Device) -> Result<u64, DiskError> {
    let mut page = AlignedBuffer::new(PAGE_BYTES);
    device.read_at(page.bytes_mut(), 0).map_err(failed("read"))?;
    match Superblock::decode(page.bytes()) {
        SuperblockState::Valid(found) => return Ok(found.store),
        SuperblockState::Foreign => {
            let words = "it is not a disk tier of Quinion";
            return Err(failed("use")(io::Error::new(io::ErrorKind::InvalidData, words)));
        }
        SuperblockState::Empty | SuperblockState::Outdated => {}
    }
    let mut number = [0; 8];
    rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| failed("number")(error.into()))?;
    let made = Superblock { store: u64::from_le_bytes(number) };
    page.bytes_mut().fill(0);
    made.encode(page.bytes_mut());
    device.write_at(page.bytes(), 0).map_err(failed("write"))?;
    Ok(made.store)
}

/// The tables of a store's segments, the newest first, without those that cannot be read; and whether these are all.
pub fn read_tables(
    asker: Asker,
    device: &Arc<dyn Device>,
    store: u64,
    segments: u32,
) -> Result<(Vec<(u32, Table)>, bool), DiskError> {
    let each = segments.div_ceil(THREADS);
    let (answers, received) = channel();
    for thread in 0..THREADS {
        let numbers = thread * each..((thread + 1) * each).min(segments);
        let (device, answers) = (Arc::clone(device), answers.clone());
        let read = move || {
            let mut buffer = AlignedBuffer::new(TABLE_PAGES * PAGE_BYTES);
            for segment in numbers {
                let table = read_table(&*device, store, segment, &mut buffer);
                if answers.send(table.map(|table| table.map(|table| (segment, table)))).is_err() {
                    return; // the opener has given up
                }
            }
        };
        asker.spawn(read).map_err(failed("start a thread for"))?;
    }
    drop(answers);
    let (mut found, mut refused, begun) = (Vec::new(), 0, Instant::now());
    let are_read = loop {
        if begun.elapsed() >= TABLES_MAX {
            break false;
        }
        match asker.receive(&received) {
            Ok(Ok(table)) => found.extend(table),
            Ok(Err(_)) if refused < READ_ERRORS_MAX => refused += 1,
            Ok(Err(error)) => return Err(failed("read the tables of")(error)),
            Err(RecvTimeoutError::Timeout) => return Err(failed("read the tables of")(asker.no_answer())),
            Err(RecvTimeoutError::Disconnected) => break true,
        }
    };
    found.sort_unstable_by_key(|(_, table)| std::cmp::Reverse(table.sequence));
    Ok((found, are_read && refused == 0))
}

/// `None`: the segment has no table of this store that is whole.
fn read_table(
    device: &dyn Device,
    store: u64,
    segment: u32,
    buffer: &mut AlignedBuffer,
) -> io::Result<Option<Table>> {
    let start = segment_start(segment);
    device.read_at(&mut buffer.bytes_mut()[..PAGE_BYTES], start)?;
    let len = Table::bytes_of(&buffer.bytes()[..PAGE_BYTES]);
    if len > PAGE_BYTES {
        device.read_at(&mut buffer.bytes_mut()[PAGE_BYTES..len], start + PAGE_BYTES as u64)?;
    }
    Ok(Table::decode(store, &buffer.bytes()[..len]))
}
