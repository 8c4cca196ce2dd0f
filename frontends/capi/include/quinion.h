/* Quinion for C: a page cache in user space. Release 0.1; link with `pkg-config --libs quinion`.
 *
 * Made of the Rust source by cbindgen: change that. The guide is docs/c.md.
 *
 * Results. Functions return 0 or a count, or a negative errno. qn_error_message() tells more of the last failure of the
 * thread: what was asked, what is wrong, what to do. Handles are given by an out parameter, which is NULL after a
 * failure. No function ends the process, sets a signal handler, or lets a Rust panic or an exception out. (When memory
 * of a few bytes cannot be had, the process ends.) errno is unspecified after a call.
 *
 * Arguments. NULL, a size or flag that is not known, and a range that ends beyond 2^63 - 1 are -EINVAL. Structs begin
 * with their size, which the caller sets to sizeof; all other fields at 0 are the defaults. A struct of another release
 * is understood: what is missing is 0, and what is more must be 0. A handle that was closed, or is of another type, and
 * a pointer to something else cannot be noticed, and are undefined.
 *
 * Ownership. A handle is yours until you close it, once. Files and pins keep what they need of a cache, so the order of
 * closing does not matter. Texts and structs that are passed are copied. Sizes and offsets are in bytes.
 *
 * Threads. All functions may be called by all threads at a time, with the same handles; a handle is closed when no call
 * uses it any more. The library has threads of its own, in which all signals are blocked.
 *
 * Signals. Calls are not interrupted by signals, and none may be made in a signal handler.
 *
 * Fork. A child has nothing of its parent's caches and connections: calls are -ECHILD, closing is 0 and does nothing,
 * and pinned bytes must not be looked at. It opens its own. exec is not affected.
 */

#ifndef QUINION_H
#define QUINION_H

#include <stddef.h>
#include <stdint.h>

/**
 * The release of this header, as qn_version() tells that of the library.
 */
#define QN_VERSION 256

/**
 * qn_cache_options.flags: keep the cache's memory from being swapped, by mlock(2), which RLIMIT_MEMLOCK bounds.
 */
#define QN_CACHE_LOCK_MEMORY 1

/**
 * qn_cache_options.flags: read and write by a pool of threads, and not by io_uring.
 */
#define QN_CACHE_THREADS 2

/**
 * qn_cache_options.flags: take all of the cache's memory from the machine at once, as qn_cache_populate().
 */
#define QN_CACHE_POPULATE 4

/**
 * qn_cache_options.readahead: read no page that was not asked for.
 */
#define QN_NO_READAHEAD UINT64_MAX

/**
 * qn_open_options.flags: the file may be written as well.
 */
#define QN_OPEN_WRITE 1

/**
 * qn_open_options.flags: the same as QN_OPEN_WRITE. qn_append() goes to the end by every handle that may write, and
 * qn_pwrite() to its offset, by this one, too; pwrite(2) with O_APPEND would not.
 */
#define QN_OPEN_APPEND 2

/**
 * qn_open_options.flags: make the file if there is none.
 */
#define QN_OPEN_CREATE 4

/**
 * qn_open_options.flags: make the file, and fail if there is one.
 */
#define QN_OPEN_CREATE_NEW 8

/**
 * qn_open_options.flags: cut the file to nothing.
 */
#define QN_OPEN_TRUNCATE 16

/**
 * qn_open_options.flags: reads and writes leave nothing in the cache that other readers do not use.
 */
#define QN_OPEN_UNCACHED 32

/**
 * qn_open_options.coherence: an open sees what was written and closed before it.
 */
#define QN_COHERENCE_CHECK 0

/**
 * qn_open_options.coherence: a read also looks whether the file changed, if the last look is older than check_ms.
 */
#define QN_COHERENCE_CHECK_EVERY 1

/**
 * qn_open_options.coherence: a read lease of the kernel, so that no read returns old bytes; without one, a look
 * before each read.
 */
#define QN_COHERENCE_LEASE 2

/**
 * qn_open_options.coherence: the file never changes, and is not looked at again.
 */
#define QN_COHERENCE_IMMUTABLE 3

/**
 * qn_open_options.durability: what was written is durable after qn_sync().
 */
#define QN_DURABLE_ON_SYNC 0

/**
 * qn_open_options.durability: each write is durable when it returns, as with O_DSYNC.
 */
#define QN_DURABLE_DATA 1

/**
 * qn_open_options.durability: the same with all attributes, as with O_SYNC.
 */
#define QN_DURABLE_ALL 2

/**
 * qn_pread_with() and qn_pread_batch(): do not wait, for a device or a lock.
 */
#define QN_READ_NOWAIT 1

/**
 * qn_pread_with() and qn_pread_batch(): start no input or output, and read what is cached.
 */
#define QN_READ_CACHED_ONLY 2

/**
 * qn_pread_with() and qn_pread_batch(): leave nothing in the cache that other readers do not use.
 */
#define QN_READ_UNCACHED 4

/**
 * qn_sync(): the bytes, and what of the attributes is needed to read them, as fdatasync(2).
 */
#define QN_SYNC_DATA 0

/**
 * qn_sync(): the bytes and all attributes, as fsync(2).
 */
#define QN_SYNC_ALL 1

/**
 * qn_advise(): no particular pattern.
 */
#define QN_ADVICE_NORMAL 0

/**
 * qn_advise(): from the beginning to the end; larger readahead windows.
 */
#define QN_ADVICE_SEQUENTIAL 1

/**
 * qn_advise(): no readahead.
 */
#define QN_ADVICE_RANDOM 2

/**
 * qn_advise(): what is read is not read again.
 */
#define QN_ADVICE_NO_REUSE 3

/**
 * qn_memory_file_options.flags: its pages do not go to the cache's spill file.
 */
#define QN_MEMORY_UNEVICTABLE 1

/**
 * qn_connect_options.reconnect_ms: wait for no other server.
 */
#define QN_NO_RECONNECT UINT64_MAX

/**
 * A page cache of this process, made by qn_cache_open().
 */
typedef struct qn_cache qn_cache;

/**
 * A connection to a server, made by qn_connect().
 */
typedef struct qn_client qn_client;

/**
 * An open file, made by qn_open(), qn_open_fd(), qn_open_backend(), qn_memory_file() or qn_client_open().
 */
typedef struct qn_file qn_file;

/**
 * Bytes of a file that stay where they are, made by qn_pin_range().
 */
typedef struct qn_pin qn_pin;

/**
 * A share of a cache, made by qn_pool_add(); passed to opens by their options.
 */
typedef struct qn_pool qn_pool;

/**
 * Options of a cache. All zero but the size are the defaults. Texts are copied.
 */
typedef struct qn_cache_options {
  /**
   * sizeof(struct qn_cache_options).
   */
  size_t size;
  /**
   * The bound on its memory in bytes, at least 16 MiB: data, tables and reads in flight together. 0: a quarter of
   * what the machine or the container allows.
   */
  uint64_t memory;
  /**
   * The most that qn_cache_resize() can give it later, in bytes. 0: memory.
   */
  uint64_t memory_max;
  /**
   * The most that pins may keep, in bytes. 0: half of memory.
   */
  uint64_t pinned_max;
  /**
   * The largest readahead window in bytes. 0: 4 MiB. QN_NO_READAHEAD: none.
   */
  uint64_t readahead;
  /**
   * A folder for a disk tier, or NULL. It takes pages of backends whose bytes never change.
   */
  const char *disk_folder;
  /**
   * The most that the disk tier may take, in bytes. 0 without a folder.
   */
  uint64_t disk_bytes;
  /**
   * A file to which cold pages of memory files may go, or NULL. It is made, and removed.
   */
  const char *spill_path;
  /**
   * The most that this file may take, in bytes. 0 without a path.
   */
  uint64_t spill_bytes;
  /**
   * QN_CACHE_... flags.
   */
  uint32_t flags;
  /**
   * 0.
   */
  uint32_t reserved;
} qn_cache_options;

/**
 * Options of a pool. All zero but the size are the defaults.
 */
typedef struct qn_pool_options {
  /**
   * sizeof(struct qn_pool_options).
   */
  size_t size;
  /**
   * The most memory that its files may take, in bytes. 0: as much as the cache has.
   */
  uint64_t limit;
  /**
   * Bytes of its memory that are not evicted for files of other pools. 0: none.
   */
  uint64_t protected_bytes;
} qn_pool_options;

/**
 * Numbers of a pool. Counts are since it was made.
 */
typedef struct qn_pool_usage {
  /**
   * sizeof(struct qn_pool_usage), set by the caller.
   */
  size_t size;
  /**
   * The limit in force, in bytes; 0 if there is none.
   */
  uint64_t limit;
  /**
   * The protected minimum in force, in bytes.
   */
  uint64_t protected_bytes;
  /**
   * Bytes that its files take now.
   */
  uint64_t used_bytes;
  /**
   * Pages of 4096 bytes that were put into the cache for it.
   */
  uint64_t inserted_pages;
  /**
   * Pages of the pool that were evicted.
   */
  uint64_t evicted_pages;
  /**
   * Pages of the pool that came back soon after they were evicted.
   */
  uint64_t refaulted_pages;
} qn_pool_usage;

/**
 * How a file is to be opened. All zero but the size are the defaults: to read, as QN_COHERENCE_CHECK says.
 */
typedef struct qn_open_options {
  /**
   * sizeof(struct qn_open_options).
   */
  size_t size;
  /**
   * QN_OPEN_... flags.
   */
  uint32_t flags;
  /**
   * The permissions of a file that is made, less the umask. 0: 0666.
   */
  uint32_t mode;
  /**
   * QN_COHERENCE_...
   */
  uint32_t coherence;
  /**
   * With QN_COHERENCE_CHECK_EVERY, in milliseconds; 0 looks before each read.
   */
  uint32_t check_ms;
  /**
   * QN_DURABLE_...
   */
  uint32_t durability;
  /**
   * 0.
   */
  uint32_t reserved;
  /**
   * The pool that its pages belong to, and whose cache is used then; NULL: the default pool of the cache.
   */
  const struct qn_pool *pool;
} qn_open_options;

/**
 * One read of a batch.
 */
typedef struct qn_read {
  /**
   * From which file.
   */
  const struct qn_file *file;
  /**
   * Where to; it may be NULL if length is 0.
   */
  void *buffer;
  /**
   * How many bytes at most.
   */
  size_t length;
  /**
   * From which byte of the file on.
   */
  uint64_t offset;
  /**
   * Set by the call: what qn_pread() would have returned, so many bytes or a negative errno.
   */
  int64_t result;
} qn_read;

/**
 * Consecutive bytes in memory; laid out as struct iovec.
 */
typedef struct qn_run {
  /**
   * The first of the bytes, which must not be written.
   */
  const void *data;
  /**
   * How many there are; not 0.
   */
  size_t length;
} qn_run;

/**
 * Options of a memory file. All zero but the size are the defaults.
 */
typedef struct qn_memory_file_options {
  /**
   * sizeof(struct qn_memory_file_options).
   */
  size_t size;
  /**
   * The file's length in bytes at first, all of it a hole.
   */
  uint64_t length;
  /**
   * The file's name in messages, in UTF-8, or NULL. It is copied.
   */
  const char *name;
  /**
   * The pool that its pages belong to, and whose cache is used then; NULL: the default pool of the cache.
   */
  const struct qn_pool *pool;
  /**
   * How long writes, cuts and punches wait for pins of the bytes that they change, in milliseconds, before they are
   * -EBUSY. 0: they do not wait, and pins keep the old bytes.
   */
  uint32_t pin_wait_ms;
  /**
   * QN_MEMORY_... flags.
   */
  uint32_t flags;
} qn_memory_file_options;

/**
 * Attributes of a backend's bytes at one moment.
 */
typedef struct qn_attributes {
  /**
   * sizeof(struct qn_attributes) of the library that calls, set by it; to be left as it is.
   */
  size_t size;
  /**
   * How many bytes there are.
   */
  uint64_t length;
  /**
   * Which file it is: two opens with one identity share pages, and two different files must have different ones.
   */
  uint64_t identity[2];
  /**
   * Which content it has: another number after each change that was made elsewhere.
   */
  int64_t version;
} qn_attributes;

/**
 * Functions that read and write a file in place of the system's.
 *
 * They are called by several threads at a time, among them the library's own, which have all signals blocked. They may
 * block. They return a negative errno if they fail; -EINTR means that the call is to be made again. They must not call
 * this library for the same cache, not throw, not longjmp and not end the process.
 */
typedef struct qn_backend {
  /**
   * sizeof(struct qn_backend).
   */
  size_t size;
  /**
   * Passed to each function.
   */
  void *context;
  /**
   * Reads up to length bytes at byte offset into buffer, and returns how many: 0 only at the end.
   */
  int64_t (*read)(void *context, void *buffer, size_t length, uint64_t offset);
  /**
   * Says what the bytes are: fills *attributes, whose size is set.
   */
  int (*attributes)(void *context, struct qn_attributes *attributes);
  /**
   * Writes up to length bytes at byte offset, and returns how many, not 0. Bytes behind the end make the file
   * longer, with zeros between. NULL: the file is read only; then sync and truncate are NULL, too.
   */
  int64_t (*write)(void *context, const void *buffer, size_t length, uint64_t offset);
  /**
   * Makes durable what was written before the call: QN_SYNC_DATA or QN_SYNC_ALL, at least length bytes at offset.
   * qn_close() of another file may call it, too: hold no lock there that this takes.
   */
  int (*sync)(void *context, uint32_t kind, uint64_t offset, uint64_t length);
  /**
   * Cuts the bytes, or adds zeros.
   */
  int (*truncate)(void *context, uint64_t length);
  /**
   * Called once for each open that succeeded, when no function of this backend will be called any more; may be
   * NULL. It comes in qn_close() or long after it, because the cache keeps pages of closed files. It reads and
   * writes a file by the first backend that it was opened with. A thread of the library may call it, shortly after
   * the call that ended the cache has returned. Free the context here, and not before. If two opens have one
   * context, it must last until both were released: count them.
   */
  void (*release)(void *context);
  /**
   * How many threads of the library may be in read and write at a time. 0: 4.
   */
  uint32_t threads;
  /**
   * 0.
   */
  uint32_t reserved;
} qn_backend;

/**
 * How to connect. All zero but the size are the defaults.
 */
typedef struct qn_connect_options {
  /**
   * sizeof(struct qn_connect_options).
   */
  size_t size;
  /**
   * How long opens and reads wait for another server in the place of one that has ended, in milliseconds.
   * 0: 5 seconds. QN_NO_RECONNECT: not at all.
   */
  uint64_t reconnect_ms;
} qn_connect_options;

/**
 * Numbers of a cache. Counts are since it was built; sizes are now.
 */
typedef struct qn_stats {
  /**
   * sizeof(struct qn_stats), set by the caller.
   */
  size_t size;
  /**
   * The bound in force, in bytes.
   */
  uint64_t memory_bytes;
  /**
   * Bytes of it in use.
   */
  uint64_t used_bytes;
  /**
   * Bytes of pages in the cache now.
   */
  uint64_t cached_bytes;
  /**
   * Bytes kept by pins, folios counted whole.
   */
  uint64_t pinned_bytes;
  /**
   * Bytes of pages that were written here and are not in their files yet.
   */
  uint64_t dirty_bytes;
  /**
   * Files known, open or idle.
   */
  uint64_t files;
  /**
   * Read calls, each read of a batch counted.
   */
  uint64_t reads;
  /**
   * Read calls answered from the cache alone.
   */
  uint64_t hits;
  /**
   * Read calls that waited for bytes, or would have.
   */
  uint64_t misses;
  /**
   * Bytes given to readers.
   */
  uint64_t read_bytes;
  /**
   * Requests sent to devices and backends.
   */
  uint64_t device_reads;
  /**
   * Bytes that they delivered.
   */
  uint64_t device_bytes;
  /**
   * Requests that failed.
   */
  uint64_t device_errors;
  /**
   * Bytes written to devices and backends.
   */
  uint64_t device_written_bytes;
  /**
   * Writes that failed. Their pages are tried again.
   */
  uint64_t device_write_errors;
  /**
   * Calls that asked for something to be made durable.
   */
  uint64_t syncs;
  /**
   * Syncs that failed.
   */
  uint64_t sync_errors;
  /**
   * Bytes of pages evicted to make room.
   */
  uint64_t evicted_bytes;
  /**
   * Bytes of pages that came back after they had been evicted.
   */
  uint64_t refaulted_bytes;
} qn_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The message of the last call of this thread that failed: what was asked, what is wrong, what to do.
 *
 * Never NULL; "" before the first failure. The text is the library's, in UTF-8, and stays until the next call of this
 * thread that fails. A call that succeeds does not change it. Does not block.
 */
const char *qn_error_message(void);

/**
 * The release of the library that runs, as major * 65536 + minor * 256 + patch: compare with QN_VERSION, that of the
 * header. Does not block.
 */
uint32_t qn_version(void);

/**
 * Builds a cache.
 *
 * options may be NULL. *cache is yours until qn_cache_close(). Address space for memory_max is reserved, and memory is
 * taken as it is needed, or at once with QN_CACHE_POPULATE. May block for the disk tier and for that memory.
 *
 * Errors: -EINVAL (an argument, or options that do not fit each other), -ENOMEM and other numbers of the system.
 */
int qn_cache_open(const struct qn_cache_options *options,
                  struct qn_cache **cache);

/**
 * Makes all that was written durable, as qn_cache_sync(), and gives the handle back, also if that failed.
 *
 * The cache itself ends with the last of its handle, files, pools and pins; what could not be written is lost then.
 * Blocks for the device. No other call may use the handle then or later: that cannot be noticed, and is undefined.
 *
 * Errors: those of qn_cache_sync(). In a forked child 0 is returned and nothing is done.
 */
int qn_cache_close(struct qn_cache *cache);

/**
 * Makes durable what was written to all files of a cache, as qn_sync() of each, also of those that are closed.
 *
 * All files are tried, whatever went wrong with one. Blocks for the device.
 *
 * Errors: the first error: -EIO, -ENOSPC and other numbers of the system; -EINVAL, -ECHILD.
 */
int qn_cache_sync(const struct qn_cache *cache);

/**
 * Gives a cache another bound on its memory, in bytes: 16 MiB to memory_max. Rounded down to whole 2 MiB.
 *
 * A smaller bound evicts at once what it can; what is pinned or in flight leaves later. May block for locks.
 *
 * Errors: -EINVAL (the bound is out of its range), -ECHILD.
 */
int qn_cache_resize(const struct qn_cache *cache, uint64_t memory);

/**
 * Takes memory from the machine now, until a cache has that many bytes, or its bound, or there is no more.
 *
 * Returns how many it has. By itself a cache takes memory as it fills, and reads that fill it wait for that. Blocks
 * for the memory; other threads may read meanwhile.
 *
 * Errors: -EINVAL, -ECHILD.
 */
int64_t qn_cache_populate(const struct qn_cache *cache,
                          uint64_t bytes);

/**
 * Walks a whole cache and compares what its parts know of each other, for tests and reports of defects.
 *
 * Takes long, and wants that no other thread uses the cache meanwhile.
 *
 * Errors: -EUCLEAN (the message says what does not fit), -EINVAL, -ECHILD.
 */
int qn_cache_check(const struct qn_cache *cache);

/**
 * Makes a pool in a cache; a name is given once.
 *
 * name is UTF-8, and is copied. options may be NULL. *pool is yours until qn_pool_close(). May wait for locks.
 *
 * Errors: -EINVAL (an argument, a name that the cache has, too many pools, or more is protected than there is),
 * -ECHILD.
 */
int qn_pool_add(const struct qn_cache *cache,
                const char *name,
                const struct qn_pool_options *options,
                struct qn_pool **pool);

/**
 * Changes a pool's limit, in bytes; 0 takes it away. Pages above it are evicted. May wait for locks.
 *
 * Errors: -EINVAL, -ECHILD.
 */
int qn_pool_set_limit(const struct qn_pool *pool, uint64_t limit);

/**
 * Changes what of a pool's memory is not evicted for other pools, in bytes. May wait for locks.
 *
 * Errors: -EINVAL (more is protected in all than the cache has), -ECHILD.
 */
int qn_pool_set_protected(const struct qn_pool *pool, uint64_t protected_bytes);

/**
 * Fills *usage, whose size the caller has set, with a pool's numbers. Does not block.
 *
 * Errors: -EINVAL.
 */
int qn_pool_stats(const struct qn_pool *pool, struct qn_pool_usage *usage);

/**
 * Gives a pool's handle back. Files of it stay open, and in the pool. May wait for locks.
 *
 * Errors: -EINVAL. In a forked child 0 is returned and nothing is done.
 */
int qn_pool_close(struct qn_pool *pool);

/**
 * Opens a file of the system through a cache.
 *
 * Regular files and block devices can be opened. options may be NULL. *file is yours until qn_close(), and keeps the
 * cache. All handles of a file share its pages: what one writes the others read at once. Blocks as open(2) does.
 *
 * Errors: those of open(2), as -ENOENT and -EACCES; -EISDIR; -EINVAL (an argument, or a pipe, a socket, a terminal
 * or a file of procfs, which cannot be cached); -ENOBUFS (no memory for another file); -ECHILD.
 */
int qn_open(const struct qn_cache *cache,
            const char *path,
            const struct qn_open_options *options,
            struct qn_file **file);

/**
 * Opens the file that a descriptor is open of, as qn_open() does by a path.
 *
 * The descriptor stays the caller's, and may be closed after the call.
 *
 * Errors: -EBADF (not a descriptor); those of qn_open().
 */
int qn_open_fd(const struct qn_cache *cache,
               int fd,
               const struct qn_open_options *options,
               struct qn_file **file);

/**
 * Gives a file's handle back. Written bytes stay in the cache, and are written to the file in the background.
 *
 * It makes nothing durable that you may rely on: call qn_sync() before, and look at what it returns. Pins of the file
 * stay. May block for locks; for the device if a memory file has a spill file, or if many closed files were written
 * and not synced: then it syncs some of them, and so may call the sync of other backends. No call may use the handle
 * after it.
 *
 * Errors: -EINVAL. In a forked child 0 is returned and nothing is done.
 */
int qn_close(struct qn_file *file);

/**
 * Reads up to length bytes at byte offset into buffer, and returns how many: fewer only at the end of the file, or if
 * something went wrong after some of them, which the next call tells. 0: the end, or a length of 0.
 *
 * A hit takes no lock and makes no system call. A miss blocks for the device, the backend or the server. It is not
 * interrupted by signals. buffer may be NULL if length is 0.
 *
 * Errors: -EIO or what the device or backend says (nothing was cached, a later read tries again); -ENOBUFS (all pages
 * are pinned or in flight); -EINVAL; -ECHILD. Of a server's file also -ESTALE (the object was replaced), -EREMOTEIO
 * (the store failed), -ECONNRESET (the server has ended), -ETIMEDOUT. buffer may have been written to.
 */
int64_t qn_pread(const struct qn_file *file,
                 void *buffer,
                 size_t length,
                 uint64_t offset);

/**
 * As qn_pread(), with QN_READ_... flags, which files of a cache know.
 *
 * Errors: those of qn_pread(); -EAGAIN (not even the first byte can be had without what the flags forbid); -EOPNOTSUPP
 * (a memory file, or one of a server).
 */
int64_t qn_pread_with(const struct qn_file *file,
                      void *buffer,
                      size_t length,
                      uint64_t offset,
                      uint32_t flags);

/**
 * Writes length bytes at byte offset, and returns how many: fewer only if something went wrong after some of them.
 * Bytes behind the end make the file longer, with zeros between.
 *
 * The bytes are in the cache then, for all its readers; qn_sync() makes them durable. May block: for memory, for the
 * page that is written in part, and a little while too much is dirty. buffer may be NULL if length is 0.
 *
 * Errors: -EBADF (opened for reading only), -EROFS, -ENOSPC and other numbers of the system, -EIO (earlier writes
 * cannot be written back), -ENOBUFS, -EBUSY (pins), -EOPNOTSUPP, -EINVAL, -ECHILD.
 */
int64_t qn_pwrite(const struct qn_file *file,
                  const void *buffer,
                  size_t length,
                  uint64_t offset);

/**
 * Writes length bytes at the end of the file, all of them, and returns the byte at which they begin.
 *
 * Appends of all handles of one cache follow each other. Blocks as qn_pwrite() does.
 *
 * Errors: those of qn_pwrite().
 */
int64_t qn_append(const struct qn_file *file, const void *buffer, size_t length);

/**
 * Makes durable what was written to a file before the call, by any handle of the cache: QN_SYNC_DATA or QN_SYNC_ALL.
 *
 * 0 is true whatever failed before. An error of writing is told to each handle once. After an error the bytes stay in
 * the cache, and the next sync tries them again. Of a memory file it does nothing. Blocks for the device.
 *
 * Errors: -EIO, -ENOSPC and other numbers of the system; -EOPNOTSUPP (a file of a server), -EINVAL, -ECHILD.
 */
int qn_sync(const struct qn_file *file,
            uint32_t kind);

/**
 * Gives a file a length in bytes: cuts it, or makes it longer with zeros. Blocks for the device.
 *
 * Errors: those of qn_pwrite(); the length is what it was then.
 */
int qn_truncate(const struct qn_file *file, uint64_t length);

/**
 * The length of a file in bytes, as far as the cache knows it: what was written through it counts. Does not block.
 *
 * Errors: -EINVAL, -ECHILD.
 */
int64_t qn_length(const struct qn_file *file);

/**
 * Makes length bytes at byte offset a hole, which reads as zeros. The file's length does not change. Blocks for the
 * device.
 *
 * Errors: those of qn_pwrite(); some of the bytes may read as zeros then.
 */
int qn_punch_hole(const struct qn_file *file,
                  uint64_t offset,
                  uint64_t length);

/**
 * Reserves space for length bytes at byte offset: on the file system, as fallocate(2) with FALLOC_FL_KEEP_SIZE, or in
 * memory for a memory file. Neither bytes nor length change. Blocks for the device.
 *
 * Errors: those of qn_pwrite(); -EINVAL also if the bytes are not all of a memory file: qn_truncate() makes it longer;
 * -EOPNOTSUPP (a backend of functions, or a file system that reserves nothing).
 */
int qn_allocate(const struct qn_file *file,
                uint64_t offset,
                uint64_t length);

/**
 * Starts to read length bytes at byte offset into the cache, as far as they are not there, and does not wait for
 * them. Returns how many bytes were started; of a server's file, which does not say that, 0. May wait for locks.
 *
 * Errors: -EOPNOTSUPP (a memory file), -EINVAL, -ECHILD.
 */
int64_t qn_will_need(const struct qn_file *file,
                     uint64_t offset,
                     uint64_t length);

/**
 * Drops what of length bytes at byte offset is cached, clean and not pinned. Returns how many bytes were dropped. May
 * wait for locks.
 *
 * Errors: -EOPNOTSUPP (a memory file, or one of a server), -EINVAL, -ECHILD.
 */
int64_t qn_dont_need(const struct qn_file *file,
                     uint64_t offset,
                     uint64_t length);

/**
 * Tells how this handle will be read: QN_ADVICE_... May wait for a read of the same handle.
 *
 * Errors: -EOPNOTSUPP (a memory file, or one of a server), -EINVAL, -ECHILD.
 */
int qn_advise(const struct qn_file *file, uint32_t advice);

/**
 * Looks whether another process has changed a file since its pages were cached, and forgets its clean pages if so.
 * Returns 1 then, also if the last change is too recent to tell; else 0. Blocks as fstat(2) does.
 *
 * Errors: -EOPNOTSUPP (a memory file, or one of a server), -EIO and other numbers of the system, -EINVAL, -ECHILD.
 */
int qn_revalidate(const struct qn_file *file);

/**
 * Makes count reads, of one file or several: as many calls of qn_pread() would, but side by side. flags are
 * QN_READ_..., for all of them.
 *
 * Each read has its own result, and one that fails does not stop others. Returns 0 if all succeeded; else the first
 * error, whose message is kept. Buffers must not overlap. Reads of ascending offsets let neighbouring missing pages be
 * read as one. Blocks as qn_pread() does.
 *
 * Errors: -EINVAL (also buffers that overlap; nothing was read then, and each result is -EINVAL); those of qn_pread()
 * and qn_pread_with().
 */
int qn_pread_batch(struct qn_read *reads,
                   size_t count,
                   uint32_t flags);

/**
 * Pins up to length bytes at byte offset, without a copy: as many as there are before the end of the file, and
 * possibly none. (A server's local files are copied.)
 *
 * The bytes do not move and do not change until qn_unpin(), also if the file is written, cut or closed. They must not
 * be written. *pin is yours until then. A pin keeps whole folios of up to 2 MiB from eviction; qn_cache_options
 * .pinned_max bounds that. Blocks as qn_pread() does. In a forked child the bytes must not be looked at: its memory
 * does not have them.
 *
 * Errors: those of qn_pread(); -ENOBUFS also: pins keep as much as they may, or there are too many runs.
 */
int qn_pin_range(const struct qn_file *file,
                 uint64_t offset,
                 size_t length,
                 struct qn_pin **pin);

/**
 * Tells where a pin's bytes are: *runs is the first of *count runs, in the order of the file.
 *
 * The list is the pin's, and stays until qn_unpin(). *runs may be cast to const struct iovec *. Does not block.
 *
 * Errors: -EINVAL.
 */
int qn_pin_runs(const struct qn_pin *pin,
                const struct qn_run **runs,
                size_t *count);

/**
 * Tells where a pin's bytes are in one piece: *data is the first of qn_pin_length() bytes, which must not be written.
 *
 * Runs that do not follow each other in memory are mapped a second time, side by side, without a copy: the first call
 * takes some microseconds for each. *data stays until qn_unpin(). Does not block.
 *
 * Errors: -EINVAL; -EOPNOTSUPP: the runs have fewer than 64 KiB on average, or one is a hole of a memory file, or the
 * kernel refuses; use qn_pin_runs().
 */
int qn_pin_mapped(const struct qn_pin *pin,
                  const void **data);

/**
 * How many bytes are pinned. Does not block.
 *
 * Errors: -EINVAL.
 */
int64_t qn_pin_length(const struct qn_pin *pin);

/**
 * Gives a pin back; its bytes may be evicted or overwritten from then on. May block for the server of a file.
 *
 * Errors: -EINVAL. In a forked child 0 is returned and nothing is done.
 */
int qn_unpin(struct qn_pin *pin);

/**
 * Makes a memory file in a cache: bytes that no file system has, and that end with qn_close().
 *
 * options may be NULL. *file is yours until qn_close(). Each call makes a new file; a name need not be the only one.
 * May wait for locks.
 *
 * Errors: -EINVAL, -ENOBUFS (no memory for its record), -ECHILD.
 */
int qn_memory_file(const struct qn_cache *cache,
                   const struct qn_memory_file_options *options,
                   struct qn_file **file);

/**
 * Opens a file that functions of the caller's read and write.
 *
 * The struct is copied; its context and functions must stay until release was called. If the call fails, release is
 * not called, and the context is the caller's again. options may be NULL; a coherence other than QN_COHERENCE_CHECK
 * looks at attributes(). *file is yours until qn_close(). Blocks as the function attributes does.
 *
 * Errors: what attributes() returned; -EBADF (to be written, and the backend reads only); -EINVAL, -ENOBUFS, -ECHILD.
 */
int qn_open_backend(const struct qn_cache *cache,
                    const struct qn_backend *backend,
                    const struct qn_open_options *options,
                    struct qn_file **file);

/**
 * Connects to the server of that name, as `quinion serve --name` gave it; a name with a slash is the path of its
 * socket.
 *
 * options may be NULL. *client is yours until qn_client_close(). All clients of one server in a process are one
 * connection. Blocks for ten seconds at most.
 *
 * Errors: -ECONNREFUSED (there is no such server), -EACCES and other numbers of the system, -EINVAL, -ECHILD.
 */
int qn_connect(const char *server,
               const struct qn_connect_options *options,
               struct qn_client **client);

/**
 * Opens an object by its URL, as "s3://bucket/key", by the server's stores; or a local file by its path.
 *
 * name is UTF-8, and the key of a URL percent-encoded. *file is yours until qn_close(), and reads one version of the
 * object. It may outlive the client. Blocks for the store.
 *
 * Errors: -ENOENT, -EACCES and other numbers that the server tells with words; -ECONNRESET (the server has ended),
 * -ETIMEDOUT, -EINVAL, -ECHILD.
 */
int qn_client_open(const struct qn_client *client,
                   const char *name,
                   struct qn_file **file);

/**
 * Whether the server runs, or another in its place: 1 or 0. Does not block while the server runs.
 *
 * If it has ended, another is connected to that listens in its place. That blocks for 0.2 s at most, if one listens
 * and does not answer.
 *
 * Errors: -EINVAL, -ECHILD.
 */
int qn_client_is_connected(const struct qn_client *client);

/**
 * Gives a client back. Files that it opened stay open. The process stays connected until it ends.
 *
 * Errors: -EINVAL. In a forked child 0 is returned and nothing is done.
 */
int qn_client_close(struct qn_client *client);

/**
 * Fills *stats, whose size the caller has set, with a cache's numbers. Does not block. In a forked child they are 0.
 *
 * Errors: -EINVAL.
 */
int qn_cache_stats(const struct qn_cache *cache,
                   struct qn_stats *stats);

/**
 * Tells one number of a cache by its name in the Rust library, as "hits" or "evicted_pages": there are more than in
 * struct qn_stats. Does not block.
 *
 * Errors: -ENOENT (the message lists all names), -EINVAL.
 */
int qn_cache_stat(const struct qn_cache *cache,
                  const char *name,
                  uint64_t *value);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* QUINION_H */
