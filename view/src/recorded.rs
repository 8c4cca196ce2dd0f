//! Recorded: the layout as text, beside what is recorded of its version in `layouts/VERSION.txt`.
//!
//! ```text
//!   sizes and offsets of what is shared      Header 204 8            each field is named, or this does not compile
//!   numbers                                  Operation Fill 2        each variant, the same
//!   samples of words and messages            JoinRequest { ... } 51..
//! ```
//!
//! An owner and a viewer of one version must mean the same by each byte. So a change of any line here needs another
//! [`LAYOUT_VERSION`], and a file of its own; no program can know what a number means, so a field that is *used*
//! otherwise is the author's to remember.
//!
//! `QUINION_RECORD=1 cargo test -p quinion-view --lib recorded` records a version that has no file yet. It does not
//! change one that has: viewers of that version may be out there. If it was never released, delete its file first.

use std::fmt::Write;
use std::fs;
use std::mem::{align_of, offset_of, size_of};
use std::path::PathBuf;

use crate::arena::control::{
    Advice, AttachPolicy, COMMON_BYTES, CONTROL_BYTES, CONTROL_MAGIC, CREDIT_SPENT, Control, Counter,
    GROUP_VIEWERS, Operation, Patching, Reason, Request, SENT, SyscallAudit, TO_BE_SENT, UNCACHED,
    VIEWER_BYTES, VIEWERS_MAX, ViewerPage, opening_of, page_offset, place_of, state,
};
use crate::arena::referenced::{AHEAD, ASKED, READS_MAX};
use crate::arena::{
    CELLS_PER_PAGE, CellNumber, Descriptor, DescriptorWord, Flags, HOLDS_MAX, Header, LAYOUT_VERSION, Layout,
    MAGIC, NO_PLACE, NodeHead, OWNER_ENDED, Record, Validation,
};
use crate::lookup::NODE_BITS;
use crate::units::{EXTENT_SIZE, FileId, Frame, MappingId, PAGE_SIZE, POOLS_MAX};
use crate::viewer::handshake::{
    ANY_CACHE, DESCRIPTORS_MAX, DescriptorOffer, JoinReply, JoinRequest, NAME_MAX, NAME_TEXT_MAX, NO_PLAN,
    NameOffer, NameReply,
};
use crate::xarray::{Entry, Value};

/// A structure, and each of its fields: the pattern does not compile without one of them.
macro_rules! structure {
    ($text:ident, $name:ident { $($field:ident),+ $(,)? }) => {
        let _ = |known: &$name| {
            let $name { $($field: _),+ } = known;
        };
        line(&mut $text, &format!("{} {} {}", stringify!($name), size_of::<$name>(), align_of::<$name>()));
        $(line(&mut $text, &format!("{}.{} {}", stringify!($name), stringify!($field), offset_of!($name, $field)));)+
    };
}

/// The variants of an enum: the match does not compile without one of them.
macro_rules! numbers {
    ($text:ident, $name:ident { $($variant:ident),+ $(,)? }) => {
        let _ = |known: $name| match known {
            $($name::$variant => {})+
        };
        $(line(&mut $text, &format!("{} {} {}", stringify!($name), stringify!($variant), $name::$variant as u64));)+
    };
}

macro_rules! constants {
    ($text:ident, $($constant:expr),+ $(,)?) => {
        $(line(&mut $text, &format!("{} {:#x}", stringify!($constant), $constant));)+
    };
}

/// An expression with what it is, as bytes or a number.
macro_rules! samples {
    ($text:ident, $($sample:expr),+ $(,)?) => {
        $(line(&mut $text, &format!("{} = {:x?}", stringify!($sample), $sample));)+
    };
}

fn line(text: &mut String, line: &str) {
    // Expressions are as the compiler prints them: over one line.
    let words: Vec<_> = line.split_whitespace().collect();
    text.push_str(&words.join(" "));
    text.push('\n');
}

fn structures() -> String {
    let mut text = String::new();
    structure!(
        text,
        Header { magic, version, features, token, owner, spare, layout, apart, frames_grown, owner_lives }
    );
    structure!(
        text,
        Layout {
            frames_max,
            frames_meta,
            descriptors,
            referenced,
            write_sequences,
            uptodate,
            dirty,
            writeback
        }
    );
    for (name, offset) in Descriptor::FIELDS {
        line(&mut text, &format!("Descriptor.{name} {offset}"));
    }
    structure!(text, NodeHead { words });
    structure!(text, Record { root, size, id, validation, device, inode, rest });
    structure!(
        text,
        Control {
            magic,
            version,
            owner,
            token,
            closed,
            heartbeat,
            sleepers,
            attach_policy,
            leases_valid_until,
            taken,
            openings,
            attached_files,
            attached
        }
    );
    structure!(
        text,
        ViewerPage {
            request_futex,
            ring_head,
            opened_head,
            opened_tail,
            run,
            counters,
            requests,
            ring,
            opened
        }
    );
    structure!(text, Request { state, operation, arguments, error, sleeper, answers });
    text
}

fn meanings() -> String {
    let mut text = String::new();
    numbers!(
        text,
        Operation {
            Attach,
            Fill,
            Advance,
            Revalidate,
            Detach,
            WriterOpened,
            LetGo,
            Release,
            Removes,
            Hint,
            Examine,
            OpenNamed,
            Pin,
            Unpin
        }
    );
    numbers!(text, Advice { Normal, Random, Sequential, WillNeed, DontNeed, NoReuse, Passed });
    numbers!(text, SyscallAudit { Clean, Harmless, Restricted });
    numbers!(text, Validation { Kernel, Leased, CheckTimes, Immutable, OwnerLate });
    numbers!(
        text,
        Counter {
            Reads,
            Bytes,
            Asked,
            Misses,
            Files,
            KernelReads,
            KernelBytes,
            FirstReason,
            FirstPatching,
            Execs
        }
    );
    numbers!(text, Patching { Patched, NoPlan, OtherLibrary, Interposed, Threads, TooFar, Denied });
    numbers!(
        text,
        Reason {
            NotRegular,
            Writable,
            Flags,
            Duplicated,
            Forked,
            Mapped,
            Passed,
            Number,
            Refused,
            NoOwner,
            Changed,
            Foreign,
            Unguaranteed,
            Left,
            Restricted,
            Domain,
            Watched,
            Limited,
            Wrapped
        }
    );
    text
}

fn limits() -> String {
    let mut text = String::new();
    constants!(
        text,
        PAGE_SIZE,
        EXTENT_SIZE,
        NODE_BITS,
        POOLS_MAX,
        MAGIC,
        OWNER_ENDED,
        CONTROL_MAGIC,
        CONTROL_BYTES,
        COMMON_BYTES,
        VIEWER_BYTES,
        VIEWERS_MAX,
        GROUP_VIEWERS,
        page_offset(1),
        page_offset(GROUP_VIEWERS),
        CELLS_PER_PAGE,
        HOLDS_MAX,
        NO_PLACE,
        AttachPolicy::READ_BYTES_MAX,
        CREDIT_SPENT,
        SENT,
        TO_BE_SENT,
        UNCACHED,
        state::FREE,
        state::CLAIMED,
        state::PENDING,
        state::TAKEN,
        state::DONE,
        state::PENDING_UNATTENDED,
        state::GIVEN_UP,
        Flags::UPTODATE,
        Flags::LOCKED,
        Flags::MARKER,
        Flags::DETACHED,
        Flags::FREE,
        Flags::WORKINGSET,
        Flags::PARTIAL_UPTODATE,
        Flags::DROPBEHIND,
        Flags::STEADY,
        Flags::DIRTY,
        Flags::WRITEBACK,
        ASKED,
        AHEAD,
        READS_MAX,
        ANY_CACHE,
        NO_PLAN,
        NAME_MAX,
        NAME_TEXT_MAX,
        DESCRIPTORS_MAX,
    );
    text
}

fn words_and_messages() -> String {
    let mut text = String::new();
    let (file, word) = (FileId { device: 0x801, inode: 0x1234_5678 }, DescriptorWord(0xfedc_ba98_7654_3210));
    samples!(
        text,
        Layout::new(64 << 20).unwrap(),
        Layout::new(64 << 20).unwrap().entries(&(512..1024)),
        (word.sequence(), word.holds(), word.order()),
        CellNumber::of(Frame(0x123), 2).unwrap(),
        (Entry::node(5).bits(), Entry::folio(5).bits()),
        Entry::value(Value::shadow(3, 0x155)).bits(),
        Entry::value(Value::spill(3, 0x155)).bits(),
        (place_of(file, 2048), opening_of(file)),
        Advice::WillNeed.with_length(0x1000),
        MappingId::NONE,
        JoinRequest { version: 1, plan: 2, token: 3, run: 4 }.bytes(),
        DescriptorOffer { version: 1, token: 3 }.bytes(),
        NameOffer { version: 1, token: 3 }.bytes(),
        JoinReply { error: 1, viewer: 2 }.bytes(),
        NameReply { error: 1 }.bytes(),
    );
    text
}

fn present() -> String {
    let mut text = String::new();
    let _ = writeln!(text, "# The layout of version {LAYOUT_VERSION}: see view/src/recorded.rs.");
    text + &structures() + &meanings() + &limits() + &words_and_messages()
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("layouts")
}

/// The fault, if the recorded text of this version is another than the present one.
fn fault(recorded: Option<&str>, present: &str) -> Option<String> {
    let Some(recorded) = recorded else {
        let how = "QUINION_RECORD=1 cargo test -p quinion-view --lib recorded";
        return Some(format!("version {LAYOUT_VERSION} of the layout is not recorded; record it by `{how}`"));
    };
    let differs = |one: &str, other: &str| {
        let lacks = |line: &&str| !other.lines().any(|known| known == *line);
        one.lines().filter(lacks).map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    (recorded != present).then(|| {
        format!(
            "the layout has changed, and its version is still {LAYOUT_VERSION}: an owner and a viewer of two builds \
             would read each other's memory wrongly. Raise LAYOUT_VERSION in view/src/arena/layout.rs, and record it. \
             Recorded:\n{}\nNow:\n{}",
            differs(recorded, present),
            differs(present, recorded)
        )
    })
}

#[test]
fn the_layout_is_the_one_recorded_of_its_version() {
    let path = folder().join(format!("{LAYOUT_VERSION}.txt"));
    if std::env::var_os("QUINION_RECORD").is_some() && !path.exists() {
        fs::write(&path, present()).unwrap();
    }
    if let Some(fault) = fault(fs::read_to_string(&path).ok().as_deref(), &present()) {
        panic!("{fault}");
    }
    let names =
        fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let version = |name: String| name.strip_suffix(".txt").and_then(|name| name.parse::<u32>().ok()).unwrap();
    assert_eq!(names.map(version).max(), Some(LAYOUT_VERSION), "a version is raised, and never used again");
}

#[test]
fn a_change_without_another_version_is_reported_with_its_remedy() {
    let present = present();
    assert_eq!(fault(Some(&present), &present), None);
    let field = present.lines().find(|line| line.starts_with("Record.inode")).unwrap();
    for changed in [present.replace(field, "Record.inode 48"), present.replace("Operation Pin 14\n", "")] {
        let said = fault(Some(&present), &changed).unwrap();
        assert!(
            said.contains("Raise LAYOUT_VERSION") && (said.contains(field) || said.contains("Pin 14")),
            "{said}"
        );
    }
    assert!(fault(None, &present).is_some_and(|said| said.contains("QUINION_RECORD=1")));
}
