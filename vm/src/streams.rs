//! Streams: does a VM walk through its memory, and how far ahead of it is memory worth supplying?
//!
//! ```text
//!   a fault   answered with      then the VM faults where that ended                the window doubles each time
//!      v      its neighbourhood           v
//!   [ #  # # # # # # # # # # # ][ # # # # # # # # # # # # # # # ][ . . . . . .     64 KiB, 128 KiB, .. , 2 MiB
//! ```
//!
//! A page that is there makes no fault, so a fault where one of the last answers ended is the next step of a
//! **stream**. The window behind the answer is supplied then unasked, and the next step is expected at the window's
//! end. So a VM that reads all of its memory in turn makes a fault each 2 MiB, and one that touches pages anywhere
//! costs a look at [`STREAMS`] numbers.
//!
//! **Reads** run further ahead than windows, since the device needs time: by as much as the stream has walked, within
//! what the caller allows, and by a window at least. So a short stream has little read in vain. Besides its window, a
//! step names only what was not named before.
//!
//! A few streams are followed at a time, since a VM has several processors; a new one displaces the one that was not
//! met for longest. Pure.
//!
//! Not an invariant: that what is in a window was supplied when the VM gets there. It faults then, inside the window,
//! which is no step.

use std::ops::Range;

/// Streams of a VM that are followed at a time.
pub(super) const STREAMS: usize = 4;
/// The longest window, in bytes.
pub(super) const WINDOW_BYTES_MAX: u64 = 2 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Stream {
    /// The range answered or promised last, in bytes of the image.
    last: (u64, u64),
    window: u64,
    /// Up to where its bytes are being read.
    read: u64,
    /// Bytes promised to it so far: none as long as it has made no step.
    walked: u64,
    met: u64,
}

/// How far a stream may run ahead of the VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReadaheadLimits {
    /// Where the image ends.
    pub(super) image_bytes: u64,
    /// How far behind a window reads go on.
    pub(super) reach_bytes: u64,
}

/// A stream has gone on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct StreamStep {
    /// The range to be supplied now.
    pub(super) window: Range<u64>,
    /// The range to be read now, for this window and those behind it; perhaps empty.
    pub(super) reads: Range<u64>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Streams {
    streams: [Stream; STREAMS],
    faults: u64,
    is_walk: bool,
}

impl Streams {
    /// Whether the last fault was in a stream, or its next step.
    pub(super) fn is_walk(&self) -> bool {
        self.is_walk
    }

    /// A fault at byte `offset` of the image is answered with `answer`, which has it. Returns the window to be
    /// supplied behind that, if any; it ends at `image_bytes` at most. Reads go on behind it by as much as the stream
    /// has walked, `reach_bytes` at most, and by the window at least.
    pub(super) fn fault(
        &mut self,
        offset: u64,
        answer: Range<u64>,
        limits: ReadaheadLimits,
    ) -> Option<StreamStep> {
        let ReadaheadLimits { image_bytes, reach_bytes } = limits;
        self.faults += 1;
        let slack = answer.end - answer.start;
        let is_inside = |stream: &&mut Stream| (stream.last.0..stream.last.1).contains(&offset);
        if let Some(stream) = self.streams.iter_mut().find(is_inside) {
            // It is on its way there.
            stream.met = self.faults;
            self.is_walk = stream.walked > 0;
            return None;
        }
        let is_next = |stream: &&mut Stream| {
            stream.met > 0 && (stream.last.1..stream.last.1.saturating_add(slack)).contains(&offset)
        };
        if let Some(stream) = self.streams.iter_mut().find(is_next) {
            let end = answer.end.saturating_add(stream.window).min(image_bytes).max(answer.end);
            let window = stream.window.saturating_mul(2).clamp(1, WINDOW_BYTES_MAX);
            let reach = stream.walked.min(reach_bytes).max(stream.window);
            let read = end.saturating_add(reach).min(image_bytes).max(end).max(stream.read);
            let reads = stream.read.clamp(answer.end, read)..read;
            let walked = stream.walked.saturating_add(end - answer.end);
            *stream = Stream { last: (answer.start, end), window, read, walked, met: self.faults };
            self.is_walk = true;
            return (answer.end < end).then_some(StreamStep { window: answer.end..end, reads });
        }
        self.is_walk = false;
        let oldest = self.streams.iter_mut().min_by_key(|stream| stream.met).expect("there are some");
        let last = (answer.start, answer.end);
        *oldest = Stream { last, window: slack, read: answer.end, walked: 0, met: self.faults };
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RUN: u64 = 64 << 10;

    const REACH: u64 = 14 << 20;

    fn limits(image_bytes: u64) -> ReadaheadLimits {
        ReadaheadLimits { image_bytes, reach_bytes: REACH }
    }

    fn window(streams: &mut Streams, offset: u64, image: u64) -> Option<Range<u64>> {
        streams.fault(offset, answer(offset), limits(image)).map(|step| step.window)
    }

    fn answer(offset: u64) -> Range<u64> {
        offset / RUN * RUN..offset / RUN * RUN + RUN
    }

    #[test]
    fn a_walk_through_all_memory_faults_once_for_two_mebibytes() {
        let (mut streams, image) = (Streams::default(), 64 << 20);
        let (mut at, mut windows) = (0, Vec::new());
        while at < image {
            let window = window(&mut streams, at, image);
            windows.push(window.as_ref().map_or(0, |window| window.end - window.start));
            at = window.map_or(answer(at).end, |window| window.end);
        }
        let doubling = [0, RUN, 2 * RUN, 4 * RUN, 8 * RUN, 16 * RUN, 32 * RUN, 32 * RUN];
        assert_eq!(windows[..8], doubling);
        assert!(windows.len() < 40, "{} faults", windows.len());
    }

    #[test]
    fn four_walks_at_a_time_are_followed_and_scattered_faults_are_none() {
        let (mut streams, image) = (Streams::default(), 1 << 30);
        for step in 0..3 {
            for walk in 0..4_u64 {
                let at = (walk << 28) + step * RUN;
                // From the third step on, the first window has been passed.
                let at = if step == 2 { at + RUN } else { at };
                assert_eq!(window(&mut streams, at, image).is_some(), step > 0, "walk {walk}, step {step}");
            }
        }
        let mut streams = Streams::default();
        for nth in 0..1000_u64 {
            let at = nth * 7919 % 16384 * RUN;
            assert_eq!(window(&mut streams, at, image), None, "fault {nth}");
            assert!(!streams.is_walk());
        }
    }

    #[test]
    fn a_fault_inside_a_window_is_no_further_step() {
        let (mut streams, image) = (Streams::default(), 1 << 30);
        assert_eq!(window(&mut streams, 0, image), None);
        assert_eq!(window(&mut streams, RUN, image), Some(2 * RUN..3 * RUN));
        for at in [2 * RUN, 3 * RUN - 1] {
            assert_eq!(window(&mut streams, at, image), None);
            assert!(streams.is_walk());
        }
        // Two faults in one answer are no walk.
        assert_eq!(window(&mut streams, 64 * RUN, image), None);
        assert_eq!(window(&mut streams, 64 * RUN + 1, image), None);
        assert!(!streams.is_walk());
        assert_eq!(window(&mut streams, 3 * RUN, image), Some(4 * RUN..6 * RUN));
    }

    #[test]
    fn reads_of_a_long_walk_run_ahead_and_none_is_asked_for_twice() {
        let (mut streams, image) = (Streams::default(), 64 << 20);
        let (mut at, mut read, mut ahead) = (0, 0, Vec::new());
        while at < image {
            let step = streams.fault(at, answer(at), limits(image));
            at = step.as_ref().map_or(answer(at).end, |step| step.window.end);
            let Some(StreamStep { reads, .. }) = step else { continue };
            assert!(reads.start == read || ahead.is_empty(), "{reads:?}, and {read} was read");
            read = reads.end;
            ahead.push(read - at);
        }
        assert_eq!(ahead[..7], [RUN, 2 * RUN, 4 * RUN, 8 * RUN, 16 * RUN, 32 * RUN, 63 * RUN]);
        assert_eq!((ahead.iter().max(), read), (Some(&REACH), image));
    }

    proptest! {
        #[test]
        fn a_window_lies_behind_its_answer_and_in_the_image(
            faults in prop::collection::vec((0..400_u64, 0..3_u64), 1..200),
            image in 1..30_000_000_u64,
        ) {
            let (mut streams, mut at) = (Streams::default(), 0);
            for (to, how) in faults {
                at = if how == 0 { to * RUN % image } else { at };
                let answer = at..(at + RUN).min(image);
                if let Some(StreamStep { window, reads }) = streams.fault(at, answer.clone(), limits(image)) {
                    prop_assert!(answer.end <= reads.start && reads.start <= reads.end);
                    prop_assert!(window.end <= reads.end && reads.end <= image.max(window.end));
                    prop_assert!(reads.end - reads.start <= WINDOW_BYTES_MAX + REACH + RUN);
                    prop_assert!(window.start == answer.end && window.start < window.end && window.end <= image);
                    prop_assert!(window.end - window.start <= WINDOW_BYTES_MAX);
                    at = window.end % image;
                } else {
                    at = answer.end % image;
                }
            }
        }
    }
}
