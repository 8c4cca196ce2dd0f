//! Transfer: a folio's bytes to their slots, and back into frames.
//!
//! ```text
//!   out   frames --read--> checksums, slot by slot;  one Flush of the frames      (nothing is copied but for the sums)
//!         frames --copy--> heap --pack--> heap: checksums, one Flush of that      (if it saves a slot)
//!   in    a Fill for each run of slots and frames --> page by page: is that what was written?
//!         a Fill into the heap --> is it? --> unpack --copy--> frames
//!   copy  a Fill into the heap --> is it? --> unpack, if it is packed --> the reader
//! ```
//!
//! A caller that sends a folio out keeps its frames until the end is reported, and may let others write to them: then
//! it will not want the bytes in the slots. A thread that fetches waits here, fetching completions meanwhile.
//!
//! Invariants:
//!  1. The slots of a folio are taken before its Flush is made, and given back here if that fails.
//!  2. The end of a Flush takes the mutex of the slots and then, with nothing held, tells the sender.
//!  3. No page is handed on whose checksum was not looked at.

use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::{Fill, FillRun, FillSink, Flush, FlushError, FlushRun, FlushSink, WaitQueue};
use crate::folio::copy;
use crate::units::{Frame, Order, PAGE_SIZE, PageIndex};
use crate::xarray::Value;

use super::pack::{SLOT_BYTES, checksum, pack, unpack};
use super::{SharedSlots, SlotRecord, Spill, Store};

/// The receiver of the outcome for a folio that was sent out.
pub trait SpillSink: Send + Sync {
    /// The folio is in the file, and `value` says where; or it is not, and has no slots. Called once for each folio, on
    /// any thread, with no lock held. (Pages that are in flight count until this has returned.)
    fn spill_completed(&self, outcome: io::Result<Value>);
}

/// Pages of a folio that is in the spill file, and the frames that they are wanted in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpilledPart {
    /// The value that names the folio's slots.
    pub value: Value,
    /// The first of the pages, counted from the folio's first page.
    pub at: u32,
    /// The frame of the first; the others follow.
    pub frame: Frame,
    pub pages: u32,
}

struct TransferBuffer(Vec<TransferSlot>);

#[derive(Clone)]
#[repr(C, align(4096))]
struct TransferSlot([u8; SLOT_BYTES]);

impl TransferBuffer {
    fn zeroed(slots: usize) -> Self {
        Self(vec![TransferSlot([0; SLOT_BYTES]); slots])
    }
    fn of(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len().div_ceil(SLOT_BYTES));
        for (slot, bytes) in buffer.0.iter_mut().zip(bytes.chunks(SLOT_BYTES)) {
            slot.0[..bytes.len()].copy_from_slice(bytes);
        }
        buffer
    }
    fn start(&mut self) -> NonNull<u8> {
        NonNull::from(&mut self.0[..]).cast()
    }
    /// The run of slots from `first` on that fills it.
    fn run_from(&self, first: u32) -> FillRun {
        let (index, frame) = (PageIndex(u64::from(first)), Frame(0)); // the frame is not used
        FillRun { index, frame, pages: self.0.len() as u32 }
    }
    fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.0.len() * SLOT_BYTES);
        self.0.iter().for_each(|slot| bytes.extend_from_slice(&slot.0));
        bytes.truncate(len);
        bytes
    }
}

struct OutgoingFolio {
    spill: Arc<Spill>,
    value: Value,
    sink: Arc<dyn SpillSink>,
    /// The bytes to write, if they are not in the frames.
    _packed: Option<TransferBuffer>,
}

impl Spill {
    /// Makes the flush that takes the folio of `order` that `frame` heads to the file, for [`Spill::send`]. `None`:
    /// there is no run of free slots for it, and `sink` has been told.
    ///
    /// # Safety
    /// The frames are a folio's that is held, and not freed, until `sink` is told; a writer to them meanwhile does so
    /// as [`copy_in`](copy::copy_in) does.
    pub unsafe fn flush_of(&self, frame: Frame, order: Order, sink: Arc<dyn SpillSink>) -> Option<Flush> {
        self.in_flight.fetch_add(u64::from(order.pages()), Ordering::Relaxed);
        let mut packed = if self.compress { self.packed(frame, order) } else { None };
        let slots = packed.as_ref().map_or(order.pages(), |(buffer, _)| buffer.0.len() as u32);
        let Some(first) = self.take(slots) else {
            sink.spill_completed(Err(io::ErrorKind::StorageFull.into()));
            self.end(order);
            return None;
        };
        let buffer = match &mut packed {
            Some((buffer, _)) => buffer.start(),
            None => NonNull::new(self.arena.view().bytes(frame).expect("a folio has frames"))
                .expect("no frame is at address 0"),
        };
        let bytes = packed.as_ref().map_or(0, |(_, bytes)| *bytes);
        let (value, spill) = (Value::spill(order.0, first), self.me.upgrade().expect("it is being used"));
        let outgoing =
            Arc::new(OutgoingFolio { spill, value, sink, _packed: packed.map(|(buffer, _)| buffer) });
        let run = FlushRun { index: PageIndex(u64::from(first)), frame, bytes: slots as usize * SLOT_BYTES };
        // SAFETY: the frames are held until the sink is told, as the caller promises, and the buffer is the sink's,
        // which the flush keeps; both are whole slots.
        let flush = unsafe { Flush::new(run, buffer, outgoing) };
        self.note(first, slots, bytes, &flush);
        Some(flush)
    }

    /// Hands flushes of [`Spill::flush_of`] to the device. The caller holds no lock but those that a caller
    /// of a backend's flush may hold; completions may come inside.
    pub fn send(&self, flushes: Vec<Flush>) {
        if !flushes.is_empty() {
            self.backend.flush(flushes);
        }
    }

    fn packed(&self, frame: Frame, order: Order) -> Option<(TransferBuffer, u32)> {
        if order == Order(0) {
            return None;
        }
        let mut bytes = vec![0; order.bytes()];
        let from = self.arena.view().bytes(frame)?;
        // SAFETY: the folio's frames follow each other and are held; `bytes` is as long as they are, and new.
        unsafe { copy::copy_out(from, bytes.as_mut_ptr(), bytes.len()) };
        let packed = pack(&bytes)?;
        Some((TransferBuffer::of(&packed), packed.len() as u32))
    }

    fn take(&self, slots: u32) -> Option<u32> {
        let mut store = self.store();
        let first = store.slots.take(slots);
        if first.is_none() {
            self.missing_run.fetch_min(slots, Ordering::Relaxed);
        }
        first
    }

    fn note(&self, first: u32, slots: u32, packed_bytes: u32, flush: &Flush) {
        let mut bytes = [0; SLOT_BYTES];
        for nth in 0..slots {
            flush.read(nth as usize * SLOT_BYTES, &mut bytes);
            let record =
                SlotRecord::of(checksum(first + nth, &bytes), if nth == 0 { packed_bytes } else { 0 });
            self.store().records[(first + nth) as usize] = record.0;
        }
    }

    fn end(&self, order: Order) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.in_flight.fetch_sub(u64::from(order.pages()), Ordering::Relaxed);
        self.wait_queue.wake();
    }
}

impl FlushSink for OutgoingFolio {
    fn flush_completed(&self, _: FlushRun, outcome: Result<(), FlushError>) {
        let (spill, order) = (&self.spill, Order(self.value.order()));
        let errno =
            outcome.as_ref().err().map_or(0, |failed| failed.error.raw_os_error().unwrap_or(libc::EIO));
        spill.errno.store(errno, Ordering::Relaxed);
        match outcome {
            Ok(()) => self.sink.spill_completed(Ok(self.value)),
            Err(failed) => {
                spill.write_errors.fetch_add(1, Ordering::Relaxed);
                spill.free_unused(self.value);
                self.sink.spill_completed(Err(failed.into()));
            }
        }
        spill.end(order);
    }
}

#[derive(Debug)]
struct FetchBatch {
    left: AtomicUsize,
    failed: Mutex<Option<io::Error>>,
    wait_queue: Arc<WaitQueue>,
}

impl FetchBatch {
    fn of(fills: usize, wait_queue: &Arc<WaitQueue>) -> Arc<Self> {
        let (left, wait_queue) = (AtomicUsize::new(fills), Arc::clone(wait_queue));
        Arc::new(Self { left, failed: Mutex::default(), wait_queue })
    }
    fn sink(self: &Arc<Self>) -> Arc<dyn FillSink> {
        Arc::clone(self) as Arc<dyn FillSink>
    }
    fn fail(&self, error: io::Error) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

impl FillSink for FetchBatch {
    fn fill_completed(&self, run: FillRun, result: io::Result<usize>) {
        match result {
            Ok(bytes) if bytes == run.pages as usize * SLOT_BYTES => {}
            Ok(bytes) => self.fail(short(run, bytes)),
            Err(error) => self.fail(error),
        }
        // Release, partner: the Acquire in `run_fills`: a thread that sees that all have ended sees their errors, and
        // the bytes.
        self.left.fetch_sub(1, Ordering::Release);
        self.wait_queue.wake();
    }
}

struct PackedFetch {
    value: Value,
    bytes: usize,
    buffer: TransferBuffer,
}

impl Spill {
    /// Brings `parts` into their frames, and waits for it. Parts of a packed folio stand side by side. The caller reads
    /// all their values by [`Spill::begin_read`], and holds no lock that ends of fills or flushes take.
    ///
    /// # Errors
    /// The device's; or the bytes that came are not those that were written. The frames hold anything then.
    ///
    /// # Safety
    /// The frames are the caller's alone, and in no tree.
    pub unsafe fn fetch(&self, parts: &[SpilledPart]) -> io::Result<()> {
        let (plain, packed) = self.sorted(parts);
        // If a backend panics, the device may still be reading into these: then they are leaked.
        let mut packed = ManuallyDrop::new(packed);
        let fetching = FetchBatch::of(plain.len() + packed.len(), &self.wait_queue);
        let mut fills = Vec::with_capacity(plain.len() + packed.len());
        for &run in &plain {
            let bytes = self.arena.view().bytes(run.frame).expect("a run of ours exists");
            let buffer = NonNull::new(bytes).expect("no frame is at address 0");
            // SAFETY: the frames are the caller's alone until this returns, and so until all fills have ended.
            fills.push(unsafe { Fill::new(run, buffer, fetching.sink()) });
        }
        for PackedFetch { value, buffer, .. } in packed.iter_mut() {
            let run = buffer.run_from(value.payload());
            // SAFETY: the buffer is this function's, and is neither touched nor freed until all fills have ended,
            // below.
            fills.push(unsafe { Fill::new(run, buffer.start(), fetching.sink()) });
        }
        let filled = self.run_fills(fills, &fetching);
        let packed = ManuallyDrop::into_inner(packed);
        let outcome = filled
            .and_then(|()| self.verify(&plain))
            .and_then(|()| packed.iter().try_for_each(|packed| self.unpack_into(packed, parts)));
        self.read_errors.fetch_add(u64::from(outcome.is_err()), Ordering::Relaxed);
        outcome
    }

    /// Hands `fills` to the device and waits until all have ended.
    fn run_fills(&self, fills: Vec<Fill>, fetching: &FetchBatch) -> io::Result<()> {
        self.backend.submit_with_reap(fills);
        // Acquire, partner: the Release in `fill_completed`.
        self.wait_queue.wait(&*self.backend, &mut || fetching.left.load(Ordering::Acquire) == 0);
        let failed = fetching.failed.lock().unwrap_or_else(PoisonError::into_inner).take();
        failed.map_or(Ok(()), Err)
    }

    fn sorted(&self, parts: &[SpilledPart]) -> (Vec<FillRun>, Vec<PackedFetch>) {
        let (store, mut plain, mut packed) = (self.store(), Vec::<FillRun>::new(), Vec::<PackedFetch>::new());
        for part in parts {
            let record = store.record(part.value.payload());
            if record.packed_bytes() > 0 {
                if packed.last().is_none_or(|last| last.value != part.value) {
                    let slots = Store::slots_of(&store, part.value);
                    let buffer = TransferBuffer::zeroed(slots.len());
                    packed.push(PackedFetch {
                        value: part.value,
                        bytes: record.packed_bytes() as usize,
                        buffer,
                    });
                }
                continue;
            }
            let (slot, frame) = (u64::from(part.value.payload() + part.at), part.frame);
            match plain.last_mut() {
                Some(last)
                    if last.index.plus(u64::from(last.pages)).0 == slot
                        && last.frame.plus(last.pages) == frame =>
                {
                    last.pages += part.pages;
                }
                _ => plain.push(FillRun { index: PageIndex(slot), frame, pages: part.pages }),
            }
        }
        (plain, packed)
    }

    fn verify(&self, runs: &[FillRun]) -> io::Result<()> {
        let mut bytes = [0; SLOT_BYTES];
        for run in runs {
            for page in 0..run.pages {
                let from = self.arena.view().bytes(run.frame.plus(page)).expect("a run of ours exists");
                // SAFETY: a page of the arena, which is the caller's alone; `bytes` is as long.
                unsafe { copy::copy_out(from, bytes.as_mut_ptr(), PAGE_SIZE) };
                self.verify_slot(run.index.0 as u32 + page, &bytes)?;
            }
        }
        Ok(())
    }

    fn verify_slot(&self, slot: u32, bytes: &[u8; SLOT_BYTES]) -> io::Result<()> {
        let known = self.store().record(slot);
        if checksum(slot, bytes) == known.checksum() { Ok(()) } else { Err(other_bytes(slot)) }
    }

    fn verify_buffer(&self, first: u32, buffer: &TransferBuffer) -> io::Result<()> {
        buffer.0.iter().zip(first..).try_for_each(|(slot, nth)| self.verify_slot(nth, &slot.0))
    }

    fn unpack_into(&self, packed: &PackedFetch, parts: &[SpilledPart]) -> io::Result<()> {
        let first = packed.value.payload();
        self.verify_buffer(first, &packed.buffer)?;
        let bytes = unpacked(packed.value, &packed.buffer.bytes(packed.bytes))?;
        for part in parts.iter().filter(|part| part.value == packed.value) {
            let from = &bytes[part.at as usize * PAGE_SIZE..][..part.pages as usize * PAGE_SIZE];
            let to = self.arena.view().bytes(part.frame).expect("a run of ours exists");
            crate::arena::before_bytes();
            // SAFETY: the frames are the caller's alone, follow each other, and are as many as there are bytes.
            unsafe { copy::copy_in(from.as_ptr(), to, from.len()) };
        }
        Ok(())
    }
}

impl SharedSlots<'_> {
    /// Reads the bytes of the pages, all of each, and waits for it. The caller holds no lock that ends of fills or
    /// flushes take.
    ///
    /// # Errors
    /// The device's; or the bytes that came are not those that were written.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        let read = self.read_slots();
        self.spill.read_errors.fetch_add(u64::from(read.is_err()), Ordering::Relaxed);
        read
    }

    fn read_slots(&self) -> io::Result<Vec<u8>> {
        let Self { spill, value, ref pages, ref slots, packed_bytes } = *self;
        // Of a plain folio, those of the pages.
        let slots = match packed_bytes {
            0 => slots.start + pages.start..slots.start + pages.end,
            _ => slots.clone(),
        };
        // If a backend panics, the device may still be reading into it: then it is leaked.
        let mut buffer = ManuallyDrop::new(TransferBuffer::zeroed(slots.len()));
        let fetching = FetchBatch::of(1, &spill.wait_queue);
        let run = buffer.run_from(slots.start);
        // SAFETY: the buffer is this function's, and is neither touched nor freed until the fill has ended, below.
        let fill = unsafe { Fill::new(run, buffer.start(), fetching.sink()) };
        let filled = spill.run_fills(vec![fill], &fetching);
        let buffer = ManuallyDrop::into_inner(buffer);
        filled?;
        spill.verify_buffer(slots.start, &buffer)?;
        if packed_bytes == 0 {
            return Ok(buffer.bytes(slots.len() * SLOT_BYTES));
        }
        let folio = unpacked(value, &buffer.bytes(packed_bytes))?;
        Ok(folio[pages.start as usize * PAGE_SIZE..pages.end as usize * PAGE_SIZE].to_vec())
    }
}

/// The bytes of the folio that `value` stands for, made of those that it was packed into.
fn unpacked(value: Value, packed: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; Order(value.order()).bytes()];
    unpack(packed, &mut bytes).ok_or_else(|| other_bytes(value.payload()))?;
    Ok(bytes)
}

fn short(run: FillRun, bytes: usize) -> io::Error {
    let words = format!(
        "the spill file ends {bytes} bytes behind byte {}; another program has truncated it, or its disk is damaged",
        run.index.first_byte()
    );
    io::Error::new(io::ErrorKind::UnexpectedEof, words)
}

fn other_bytes(slot: u32) -> io::Error {
    let words = format!(
        "page {slot} of the spill file holds other bytes than were written there; its disk is damaged, or another \
         program writes to it"
    );
    io::Error::new(io::ErrorKind::InvalidData, words)
}
