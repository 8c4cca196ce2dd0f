//! The disk that crashes: what a sync promised is in every state that a crash may leave, and no state has a byte that
//! was never there.
//!
//! A twin has the allowed values of each byte; it knows bytes where the disk knows sectors.
//!
//! Invariant: a state that the twin does not allow fails the test, whichever seed led to it.

use std::collections::BTreeSet;
use std::ops::Range;

use proptest::prelude::*;
use quinion_testing::doubles::{CrashDisk, SECTOR};

const BYTES_MAX: usize = 5 * SECTOR;

#[derive(Clone, Debug)]
enum Op {
    Write { at: usize, len: usize, value: u8 },
    SetSize(usize),
    Punch { at: usize, len: usize },
    Sync,
    SyncPart { at: usize, len: usize },
    FailSync(u64),
}

fn ops() -> impl Strategy<Value = Op> {
    let at = prop_oneof![(0usize..5).prop_map(|sector| sector * SECTOR), 0..BYTES_MAX];
    let len = prop_oneof![Just(SECTOR), Just(1), Just(2 * SECTOR), 1..1500usize];
    prop_oneof![
        6 => (at.clone(), len.clone(), 1..=255u8).prop_map(|(at, len, value)| Op::Write { at, len, value }),
        1 => at.clone().prop_map(Op::SetSize),
        1 => (at.clone(), len.clone()).prop_map(|(at, len)| Op::Punch { at, len }),
        2 => Just(Op::Sync),
        1 => (at, len).prop_map(|(at, len)| Op::SyncPart { at, len }),
        1 => any::<u64>().prop_map(Op::FailSync),
    ]
}

/// What each byte, and the size, may be after a crash, told plainly and without sectors.
struct Twin {
    now: Vec<u8>,
    bytes: Vec<Byte>,
    sizes: BTreeSet<usize>,
}

#[derive(Clone)]
struct Byte {
    allowed: BTreeSet<u8>,
    /// What it was since the file system last changed its sector; none if that is durable.
    since_cut: Option<BTreeSet<u8>>,
    doubt: Doubt,
}

/// Whether a sync that failed was the last to be asked for a value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doubt {
    None,
    Lost,
}

impl Twin {
    fn new(start: &[u8]) -> Self {
        let byte = |at| Byte {
            allowed: BTreeSet::from([start.get(at).copied().unwrap_or(0)]),
            since_cut: None,
            doubt: Doubt::None,
        };
        let sizes = BTreeSet::from([start.len()]);
        Self { now: start.to_vec(), bytes: (0..BYTES_MAX).map(byte).collect(), sizes }
    }
    fn set(&mut self, at: usize, value: u8) {
        self.now[at] = value;
        let byte = &mut self.bytes[at];
        byte.allowed.insert(value);
        byte.since_cut.iter_mut().for_each(|since| {
            since.insert(value);
        });
        byte.doubt = Doubt::None;
    }
    /// The file system makes zeros, and is the one that changed these sectors last.
    fn cut(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        range.clone().for_each(|at| self.set(at, 0));
        for at in sectors(&range) {
            let now = self.now.get(at).copied().unwrap_or(0);
            self.bytes[at].since_cut = Some(BTreeSet::from([now]));
            self.bytes[at].doubt = Doubt::None;
        }
    }
    fn resize(&mut self, size: usize) {
        self.cut(size..self.now.len());
        if size != self.now.len() {
            self.now.resize(size, 0);
            self.sizes.insert(size);
        }
    }
    fn sync(&mut self, range: Range<usize>) {
        for at in sectors(&range) {
            let byte = &mut self.bytes[at];
            if byte.doubt == Doubt::None {
                byte.allowed = BTreeSet::from([self.now.get(at).copied().unwrap_or(0)]);
                byte.since_cut = None;
            } else if let Some(since) = &byte.since_cut {
                byte.allowed = since.clone();
            }
        }
        self.sizes = BTreeSet::from([self.now.len()]);
    }
    fn fail_sync(&mut self, found: Vec<u8>) {
        assert_eq!(found.len(), self.now.len());
        assert!(found.iter().zip(&self.bytes).all(|(byte, twin)| twin.allowed.contains(byte)));
        self.now = found;
        for byte in &mut self.bytes {
            byte.doubt = if byte.allowed.len() > 1 { Doubt::Lost } else { byte.doubt };
        }
    }
    fn allows(&self, state: &[u8]) -> Result<(), String> {
        if !self.sizes.contains(&state.len()) {
            return Err(format!("{} bytes, not one of {:?}", state.len(), self.sizes));
        }
        let wrong = state.iter().zip(&self.bytes).position(|(byte, twin)| !twin.allowed.contains(byte));
        wrong.map_or(Ok(()), |at| {
            Err(format!("byte {at} is {}, not of {:?}", state[at], self.bytes[at].allowed))
        })
    }
}

/// Bytes whose sector is in the range.
fn sectors(range: &Range<usize>) -> Range<usize> {
    range.start / SECTOR * SECTOR..range.end.next_multiple_of(SECTOR).min(BYTES_MAX)
}

fn apply(disk: &CrashDisk, twin: &mut Twin, op: &Op) {
    match *op {
        Op::Write { at, len, value } => {
            let len = len.min(BYTES_MAX - at);
            if len == 0 {
                return;
            }
            disk.write(at as u64, vec![value; len]);
            twin.resize(twin.now.len().max(at + len));
            (at..at + len).for_each(|at| twin.set(at, value));
        }
        Op::SetSize(size) => {
            disk.set_size(size as u64);
            twin.resize(size);
        }
        Op::Punch { at, len } => {
            disk.punch(at as u64..(at + len) as u64);
            twin.cut(at..(at + len).min(twin.now.len()));
        }
        Op::Sync => {
            disk.sync(0..u64::MAX);
            twin.sync(0..BYTES_MAX);
        }
        Op::SyncPart { at, len } => {
            disk.sync(at as u64..(at + len) as u64);
            twin.sync(at..at + len);
        }
        Op::FailSync(seed) => {
            disk.fail_sync(seed);
            twin.fail_sync(disk.content());
        }
    }
}

proptest! {
    /// What a sync promised is in every state that follows; and nothing else is in any but what was once there.
    #[test]
    fn every_state_is_one_that_the_syncs_allow(
        size in 0..BYTES_MAX, ops in prop::collection::vec(ops(), 1..25), seed: u64,
    ) {
        let start = vec![0; size];
        let (disk, mut twin) = (CrashDisk::new(&start[..]), Twin::new(&start));
        for op in &ops {
            apply(&disk, &mut twin, op);
            prop_assert_eq!(&disk.content(), &twin.now, "after {:?}", op);
            let log = disk.log();
            for sample in 0..12 {
                let state = log.state(log.len(), seed ^ sample);
                prop_assert_eq!(twin.allows(&state), Ok(()), "after {:?}", op);
            }
        }
        let log = disk.log();
        prop_assert_eq!(log.prefix(log.len()), disk.content());
        prop_assert_eq!(log.prefix(0), start);
        // Walking over all prefixes gives what looking at each by itself gives.
        let all: Vec<_> = log.states(3, seed).collect();
        prop_assert_eq!(all.len(), 3 * (log.len() + 1));
        for (number, (events, state)) in all.iter().enumerate() {
            let seed = seed ^ (*events as u64) << 32 ^ (number % 3) as u64;
            prop_assert_eq!(state, &log.state(*events, seed));
        }
    }
}

fn states(disk: &CrashDisk) -> BTreeSet<Vec<u8>> {
    let log = disk.log();
    (0..400).map(|seed| log.state(log.len(), seed)).collect()
}

fn write(disk: &CrashDisk, position: u64, bytes: &[u8]) {
    disk.write(position, bytes.to_vec());
}

#[test]
fn writes_come_apart_at_sectors_and_in_any_order() {
    let disk = CrashDisk::new(vec![0; 2 * SECTOR]);
    write(&disk, 0, &[1; 2 * SECTOR]);
    write(&disk, 0, &[2; 2 * SECTOR]);
    let wanted: BTreeSet<_> =
        [0, 1, 2].iter().flat_map(|&a| [0, 1, 2].map(|b| [[a; SECTOR], [b; SECTOR]].concat())).collect();
    assert_eq!(states(&disk), wanted);
    disk.sync(0..1);
    assert!(states(&disk).iter().all(|state| state[..SECTOR] == [2; SECTOR]));
    assert_eq!(states(&disk).len(), 3);
    disk.sync(0..u64::MAX);
    assert_eq!(states(&disk), BTreeSet::from([vec![2; 2 * SECTOR]]));
}

#[test]
fn a_sync_that_failed_is_not_made_up_for_by_one_that_succeeds() {
    let disk = CrashDisk::new(vec![0; 2 * SECTOR]);
    write(&disk, 0, &[1; SECTOR]);
    disk.fail_sync(3);
    disk.sync(0..u64::MAX);
    let found = states(&disk);
    assert_eq!(found.iter().map(|state| state[0]).collect::<Vec<_>>(), [0, 1]);
    write(&disk, 0, &[2; SECTOR]);
    disk.sync(0..u64::MAX);
    assert_eq!(states(&disk), BTreeSet::from([[[2; SECTOR], [0; SECTOR]].concat()]));
    // But the journal's part is made up for: it forgets nothing.
    disk.punch(0..SECTOR as u64);
    disk.set_size(SECTOR as u64);
    disk.fail_sync(4);
    disk.sync(0..u64::MAX);
    assert_eq!(states(&disk), BTreeSet::from([vec![0; SECTOR]]));
    // And at once some of what is read is not what was written.
    let lost = |seed| {
        let disk = CrashDisk::new(vec![0; SECTOR]);
        write(&disk, 0, &[1; SECTOR]);
        disk.fail_sync(seed);
        disk.content()[0]
    };
    assert!((0..20).any(|seed| lost(seed) == 0) && (0..20).any(|seed| lost(seed) == 1));
}

/// 1. A handle syncs, and the file looks as if others had changed it.
/// 2. Its reader forgets what it has, which is not durable yet, and a later sync that fails takes it away.
#[test]
fn a_sync_does_not_change_the_files_times() {
    let disk = CrashDisk::new(vec![0; SECTOR]);
    let version = || disk.attributes().version;
    let first = version();
    write(&disk, 0, &[1; SECTOR]);
    let second = version();
    assert_ne!(first, second);
    disk.sync(0..u64::MAX);
    disk.fail_sync(1);
    assert_eq!(version(), second);
    disk.punch(0..1);
    assert_ne!(version(), second);
}

#[test]
fn bytes_that_the_journal_truncated_do_not_come_back() {
    let disk = CrashDisk::new(vec![7; 2 * SECTOR]);
    disk.set_size(100);
    disk.set_size(2 * SECTOR as u64);
    for state in states(&disk) {
        let is_old = state == vec![7; 2 * SECTOR];
        assert!(is_old || state[100..].iter().all(|&byte| byte == 0), "{} bytes", state.len());
    }
    assert_eq!(states(&disk).iter().map(Vec::len).collect::<BTreeSet<_>>(), BTreeSet::from([100, 1024]));
}
