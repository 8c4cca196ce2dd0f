//! The numbers of a cache, each declared once.
//!
//! ```text
//!   gauge  NAME           how something is now; the cache says it when it is asked
//!   count  NAME           has been rising since the cache was built; the cache makes it of others
//!   event  NAME = EVENT   the same, and it is the sum of an event that threads count in their shards
//!          EVENT          an event that other numbers are made of
//! ```
//!
//! The table below is the only list of them: all else is made from it.

use std::fmt;

use super::Counters;

/// The difference, for a number that rises; the newer value, for one that does not.
macro_rules! difference {
    (count $now:expr, $earlier:expr) => {
        $now.saturating_sub($earlier)
    };
    (event $now:expr, $earlier:expr) => {
        $now.saturating_sub($earlier)
    };
    (gauge $now:expr, $earlier:expr) => {
        $now
    };
}

macro_rules! is_count {
    (count) => {
        true
    };
    (event) => {
        true
    };
    (gauge) => {
        false
    };
}

/// A number of [`Stats`], as a monitor wants to know it: see [`Stats::describe`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StatDescription {
    /// The field's name.
    pub name: &'static str,
    /// Whether it has been rising since the cache was built; else it says how something is now.
    pub is_count: bool,
    /// The first sentence of the field's documentation, which stands alone and has no links.
    pub help: &'static str,
}

fn first_sentence(text: &'static str) -> &'static str {
    let text = text.trim_ascii();
    text.find(". ").map_or(text, |end| &text[..=end])
}

macro_rules! stats {
    (
        $($(#[doc = $doc:literal])* $kind:ident $name:ident $(= $event:ident)?,)*
        -
        $($(#[doc = $own_doc:literal])* $own:ident,)*
    ) => {
        /// An event that threads count; its number is its place in a shard.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(usize)]
        pub enum Count {
            $($(
                #[doc = concat!("[`Stats::", stringify!($name), "`]")]
                $event,
            )?)*
            $($(#[doc = $own_doc])* $own,)*
        }

        pub(super) const COUNTS: usize = [$($(stringify!($event),)?)* $(stringify!($own),)*].len();

        /// Numbers of a cache. Sizes in bytes, pages of 4 KiB; counts since the cache was built, of its own
        /// process's calls (viewers count for themselves). `Display` prints the ones that people look at first.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $doc])* pub $name: u64,)*
            /// How files are read now, "io_uring" or "threads"; before the first is opened, the one to be tried first.
            pub mechanism: &'static str,
        }

        impl Stats {
            /// Every number with its name, in the order of the fields; for reports.
            pub fn numbers(&self) -> [(&'static str, u64); [$(stringify!($name)),*].len()] {
                [$((stringify!($name), self.$name)),*]
            }

            /// Descriptions of [`Stats::numbers`], in the same order.
            pub fn describe() -> [StatDescription; [$(stringify!($name)),*].len()] {
                [$(StatDescription {
                    name: stringify!($name),
                    is_count: is_count!($kind),
                    help: first_sentence(concat!($($doc),*)),
                }),*]
            }

            /// The events that `counters` have the sums of; all else is 0.
            pub(crate) fn counted(counters: &Counters) -> Stats {
                Stats { $($($name: counters.sum(Count::$event),)?)* ..Stats::default() }
            }

            /// The change since `earlier`, a snapshot of the same cache: counts are differences; gauges (sizes, pages
            /// cached, requests in flight) are those of `self`.
            #[must_use]
            pub fn since(&self, earlier: &Stats) -> Stats {
                Stats {
                    $($name: difference!($kind self.$name, earlier.$name),)*
                    mechanism: self.mechanism,
                }
            }
        }
    };
}

// Monitors show the first sentence of each: it names the counted thing, without "of these" and without links.
stats! {
    /// The bound in force.
    gauge memory_bytes,
    /// The largest bound that the cache can be given.
    gauge memory_max_bytes,
    /// Memory above a bound that was lowered, still to be given back.
    gauge slack_bytes,
    /// Memory that was given back to the machine.
    count returned_bytes,
    /// Memory that users' pins keep, folios counted whole.
    gauge pinned_bytes,
    /// Memory in use, of the bound, as the system counts it: tables, nodes, data, viewers' pages.
    gauge grown_bytes,
    /// Memory for file data that has been grown so far, free pages included.
    gauge data_bytes,
    /// Guest memory and images, all of it, whether their pages were touched yet or not.
    gauge guest_bytes,
    /// Memory for index nodes and mapping records.
    gauge index_bytes,
    /// Memory for file data in pages that hold nothing, of `data_bytes`.
    gauge free_bytes,
    /// Memory of the arena that is in 2 MiB pages.
    gauge huge_bytes,
    /// Files known, open or idle.
    gauge files,
    /// Memory files.
    gauge memory_files,
    /// Pages of memory files that stay until they are taken out of their files.
    gauge unevictable_pages,
    /// Read calls.
    count reads,
    /// Bytes given to readers.
    event read_bytes = Bytes,
    /// Read calls answered from the cache alone.
    event hits = Hits,
    /// Read calls that waited for bytes, or would have.
    event misses = Misses,
    /// Requests sent to backends, one for each contiguous run.
    event device_reads = DeviceReads,
    /// Bytes that backends delivered.
    event device_bytes = DeviceBytes,
    /// Requests to backends that failed.
    event device_errors = DeviceErrors,
    /// Requests for bytes of a file or object that had been changed or removed since it was opened. They are no errors
    /// of the device.
    event stale_reads = StaleReads,
    /// Pages that differ from their files now and are to be written.
    gauge dirty_pages,
    /// Pages that are being written now.
    gauge writeback_pages,
    /// Pages that were written to their files.
    event written_pages = WrittenPages,
    /// Writes that backends have ended, one for each contiguous run.
    event device_writes = DeviceWrites,
    /// Bytes that backends took.
    event device_written_bytes = DeviceWrittenBytes,
    /// Writes of backends that failed. Their pages are tried again.
    event device_write_errors = DeviceWriteErrors,
    /// Calls that asked for something to be made durable, writes of handles that ask with each write included.
    event syncs = Syncs,
    /// Calls for durability that returned an error, of `syncs`.
    event sync_errors = SyncErrors,
    /// Syncs of backends; one may serve several calls.
    event device_syncs = DeviceSyncs,
    /// Syncs of backends that failed. Pages that they were to make durable are written again, if still cached.
    event device_sync_errors = DeviceSyncErrors,
    /// Pages that may be lost: written and not durable when a backend's sync failed, and not cached any more then.
    event lost_pages = LostPages,
    /// Microseconds that writers were held up because too much was dirty.
    event throttled_us = ThrottledMicros,
    /// Pages in the cache now, or on their way into it. They are `inserted_pages` less [`Stats::removed_pages`]: a page
    /// counts as long as its file's index has it; while others read, a few may be counted that have just come or gone.
    gauge cached_pages,
    /// Pages put into the cache. They are `asked_pages`, `guessed_pages` and `will_need_pages` together.
    event inserted_pages = Inserted,
    /// Pages that came because they were asked for: those of folios of which a reader wanted a page.
    count asked_pages,
    /// Pages that came because readahead guessed that they will be asked for.
    count guessed_pages,
    /// Pages that came because a program said that it will need them. It calls
    /// [`File::will_need`](crate::File::will_need) for that, or awaits [`File::pin_async`](crate::File::pin_async).
    event will_need_pages = WillNeed,
    /// Pages put into the cache that no reader had asked for yet: by readahead, or because a program said that it will
    /// need them. Refaults of pages that were evicted not long before are not among them: that it is wanted was known.
    count readahead_pages,
    /// Pages of `readahead_pages` that left before they were read: evicted, dropped, forgotten because their file
    /// changed, or not delivered. [`Cache::readahead_use`](crate::Cache::readahead_use) counts the others.
    event readahead_wasted_pages = ReadaheadWasted,
    /// Pages evicted to make room.
    event evicted_pages = Evicted,
    /// Pages dropped because a program said that it does not need them.
    event dropped_pages = Dropped,
    /// Pages forgotten because their file changed.
    event invalidated_pages = Invalidated,
    /// Pages that went because the device failed to read them; each took the others of its folio with it.
    event failed_pages = Failed,
    /// Pages that went because the file, or the source that was to fill them, ended before them.
    event undelivered_pages = Undelivered,
    /// Pages forgotten with their file, which had no open handle when there were too many such files, or which was
    /// removed.
    event forgotten_pages = Forgotten,
    /// Pages dropped behind uncached reads. See [`ReadOptions::uncached`](crate::ReadOptions::uncached).
    event dropped_behind_pages = DroppedBehind,
    /// Pages of `dropped_behind_pages` that no uncached read had passed: read ahead, or in part, when its stream ended.
    event left_over_pages = LeftOver,
    /// Pages that uncached reads had put into the cache and that stay, because another reader read them. They are
    /// counted when an uncached read passes them, or its stream ends.
    event adopted_pages = Adopted,
    /// Pages of `evicted_pages` that left a shadow entry, so that their return can be classified.
    event shadowed_pages = Shadows,
    /// Pages of `inserted_pages` that had been evicted and found their shadow entry: refaults.
    event refaulted_pages = Refaults,
    /// Pages of `refaulted_pages` that had not been away for long: a cache twice as large would have kept them.
    event activated_pages = Activated,
    /// Windows read with a page of `activated_pages` that had come back before: the working set does not fit.
    event workingset_windows = WorkingsetWindows,
    /// Microseconds that readers waited for the windows of `workingset_windows`: time lost for want of memory. Waits
    /// of futures are not counted.
    event memory_stall_us = MemoryStall,
    /// Memory of index nodes that hold nothing but shadow entries, of `index_bytes`.
    gauge shadow_bytes,
    /// Requests at the backends now.
    gauge in_flight,
    /// Pages of memory files that went to the spill file.
    count spilled_pages,
    /// Pages of memory files that came back from the spill file.
    count spilled_in_pages,
    /// Pages of memory files that reads copied in the spill file, for want of memory, and that stayed there.
    count spill_read_pages,
    /// Pages in the spill file now.
    gauge spill_pages,
    /// Bytes of the spill file that its pages take.
    gauge spill_bytes,
    /// Folios that could not be written to the spill file, and requests to read some from it that failed.
    count spill_errors,
    -
    /// Pages put into the cache that no reader had asked for yet.
    Readahead,
    /// Pages of `Readahead` that had been evicted not long ago.
    ReadaheadActivated,
    /// Pages that read calls read of; counted only where a miss-ratio curve is made of them.
    PageReads,
}

impl Stats {
    /// The share of read calls that were answered from the cache alone, 0 to 1; `None` if there were none. Of an
    /// interval: `now.since(&earlier).hit_ratio()`.
    pub fn hit_ratio(&self) -> Option<f64> {
        let answered = self.hits + self.misses;
        (answered > 0).then(|| self.hits as f64 / answered as f64)
    }

    /// Pages that have left the cache, for any reason: evicted, dropped, dropped behind, invalidated, failed,
    /// undelivered and forgotten ones together. `inserted_pages` less these is the number of cached pages: exactly
    /// so when the cache is not used meanwhile and nothing is in flight.
    pub fn removed_pages(&self) -> u64 {
        let for_memory =
            self.evicted_pages + self.spilled_pages + self.dropped_pages + self.dropped_behind_pages;
        let for_change = self.invalidated_pages + self.undelivered_pages;
        for_memory + for_change + self.failed_pages + self.forgotten_pages
    }
}

impl fmt::Display for Stats {
    /// One line for each of: memory, reads, device, writes (if there were any), the spill file (if it was used).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let pages = |pages: u64| pages as f64 / 256.0;
        writeln!(
            f,
            "memory  {:.1} MiB used of {:.1} MiB; {:.1} MiB cached, {:.1} MiB pinned, {} files",
            mib(self.grown_bytes),
            mib(self.memory_bytes),
            pages(self.cached_pages),
            mib(self.pinned_bytes),
            self.files
        )?;
        write!(f, "reads   {} calls, {:.1} MiB", self.reads, mib(self.read_bytes))?;
        match self.hit_ratio() {
            Some(ratio) => writeln!(f, "; {:.1} % hits", ratio * 100.0)?,
            None => writeln!(f)?,
        }
        write!(
            f,
            "device  {} reads, {:.1} MiB by {}; {} errors; {:.1} MiB evicted",
            self.device_reads,
            mib(self.device_bytes),
            self.mechanism,
            self.device_errors,
            pages(self.evicted_pages)
        )?;
        if self.device_writes + self.dirty_pages + self.syncs > 0 {
            write!(
                f,
                "\nwrites  {:.1} MiB dirty, {:.1} MiB written in {} writes, {} errors; {} syncs, {} errors",
                pages(self.dirty_pages),
                mib(self.device_written_bytes),
                self.device_writes,
                self.device_write_errors,
                self.syncs,
                self.sync_errors
            )?;
        }
        if self.spilled_pages + self.spill_errors > 0 {
            write!(
                f,
                "\nspill   {:.1} MiB there; {:.1} MiB went, {:.1} MiB came back, {:.1} MiB read there; {} errors",
                pages(self.spill_pages),
                pages(self.spilled_pages),
                pages(self.spilled_in_pages),
                pages(self.spill_read_pages),
                self.spill_errors
            )?;
        }
        Ok(())
    }
}
