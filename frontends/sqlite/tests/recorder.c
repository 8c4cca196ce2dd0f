/*
 * Recorder: a VFS that notes what is written, cut off, synced, made and deleted, between the extension and SQLite's own
 * VFS.
 *
 *   cc -shared -fPIC -o recorder.so recorder.c        loaded before the extension, which goes over the default VFS
 *   QUINION_RECORD=FILE                               where the notes go; all processes append to one file
 *
 * A note is made with the operation, under a lock that all processes take: the notes have the order of the operations.
 * Main databases, journals and write-ahead logs are noted, each by the last part of its name; temporary files and the
 * shared memory of a write-ahead log do not outlast a crash.
 */
#include <fcntl.h>
#include <pthread.h>
#include <sqlite3ext.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/uio.h>
#include <unistd.h>
SQLITE_EXTENSION_INIT1

enum kind { WRITE = 1, TRUNCATE, SYNC, MAKE, DELETE, DELETE_SYNCED, BEGIN, COMMITTED };

/* The head of a note; the name follows it, and then the bytes that were written. */
struct note {
  uint32_t kind, name_bytes;
  int64_t position, bytes;
};

struct file {
  sqlite3_file base;
  const char *name; /* null: not noted */
  sqlite3_file *real;
};

static sqlite3_vfs *below;
static sqlite3_vfs recorder;
static int notes = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void enter(void) {
  pthread_mutex_lock(&lock);
  if (flock(notes, LOCK_EX)) abort();
}

static void leave(void) {
  if (flock(notes, LOCK_UN)) abort();
  pthread_mutex_unlock(&lock);
}

static const char *last_part(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

static void note(enum kind kind, const char *name, int64_t position, const void *data, int64_t bytes) {
  struct note head = {kind, strlen(name), position, bytes};
  struct iovec parts[] = {
      {&head, sizeof head}, {(void *)name, head.name_bytes}, {(void *)data, data ? bytes : 0}};
  ssize_t all = sizeof head + parts[1].iov_len + parts[2].iov_len;
  if (writev(notes, parts, 3) != all) abort();
}

/* Called by the test: transaction `number` is about to be committed, or is. */
void recorder_begin(int64_t number) { enter(), note(BEGIN, "", number, 0, 0), leave(); }
void recorder_committed(int64_t number) { enter(), note(COMMITTED, "", number, 0, 0), leave(); }

#define REAL(file) (((struct file *)(file))->real)
#define PASS(file, method, ...) REAL(file)->pMethods->method(REAL(file), ##__VA_ARGS__)
/* Does the operation, and makes a note of it if it went well. */
#define NOTED(file, call, kind, position, data, bytes)     \
  const char *name = ((struct file *)(file))->name;        \
  if (!name) return call;                                  \
  enter();                                                 \
  int code = call;                                         \
  if (code == SQLITE_OK) note(kind, name, position, data, bytes); \
  leave();                                                 \
  return code

static int on_close(sqlite3_file *file) { return PASS(file, xClose); }
static int on_read(sqlite3_file *file, void *to, int bytes, sqlite3_int64 at) { return PASS(file, xRead, to, bytes, at); }
static int on_write(sqlite3_file *file, const void *data, int bytes, sqlite3_int64 at) {
  NOTED(file, PASS(file, xWrite, data, bytes, at), WRITE, at, data, bytes);
}
static int on_truncate(sqlite3_file *file, sqlite3_int64 bytes) {
  NOTED(file, PASS(file, xTruncate, bytes), TRUNCATE, bytes, 0, 0);
}
static int on_sync(sqlite3_file *file, int flags) { NOTED(file, PASS(file, xSync, flags), SYNC, flags, 0, 0); }
static int on_size(sqlite3_file *file, sqlite3_int64 *bytes) { return PASS(file, xFileSize, bytes); }
static int on_lock(sqlite3_file *file, int level) { return PASS(file, xLock, level); }
static int on_unlock(sqlite3_file *file, int level) { return PASS(file, xUnlock, level); }
static int on_reserved(sqlite3_file *file, int *is) { return PASS(file, xCheckReservedLock, is); }
static int on_control(sqlite3_file *file, int what, void *with) { return PASS(file, xFileControl, what, with); }
static int on_sector(sqlite3_file *file) { return PASS(file, xSectorSize); }
static int on_device(sqlite3_file *file) { return PASS(file, xDeviceCharacteristics); }
static int on_map(sqlite3_file *file, int region, int bytes, int extend, void volatile **at) {
  return PASS(file, xShmMap, region, bytes, extend, at);
}
static int on_shm_lock(sqlite3_file *file, int first, int count, int flags) {
  return PASS(file, xShmLock, first, count, flags);
}
static void on_barrier(sqlite3_file *file) { PASS(file, xShmBarrier); }
static int on_unmap(sqlite3_file *file, int is_last) { return PASS(file, xShmUnmap, is_last); }

/* Version 2: nothing is written through a map. */
static const sqlite3_io_methods methods = {
    2,         on_close,  on_read,   on_write,    on_truncate, on_sync,   on_size,     on_lock,    on_unlock,
    on_reserved, on_control, on_sector, on_device, on_map,      on_shm_lock, on_barrier, on_unmap, 0, 0};

static int on_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out) {
  (void)vfs;
  struct file *own = (struct file *)file;
  int lasting = SQLITE_OPEN_MAIN_DB | SQLITE_OPEN_MAIN_JOURNAL | SQLITE_OPEN_WAL;
  own->base.pMethods = 0;
  own->name = name && flags & lasting ? last_part(name) : 0;
  own->real = (sqlite3_file *)(own + 1);
  enter();
  int is_new = name && access(name, F_OK);
  int code = below->xOpen(below, name, own->real, flags, out);
  if (code == SQLITE_OK && own->name && is_new) note(MAKE, own->name, 0, 0, 0);
  leave();
  if (own->real->pMethods) own->base.pMethods = &methods;
  return code;
}

static int on_delete(sqlite3_vfs *vfs, const char *name, int sync_folder) {
  (void)vfs;
  enter();
  int code = below->xDelete(below, name, sync_folder);
  if (code == SQLITE_OK) note(sync_folder ? DELETE_SYNCED : DELETE, last_part(name), 0, 0, 0);
  leave();
  return code;
}

static int on_access(sqlite3_vfs *vfs, const char *name, int flags, int *is) {
  (void)vfs;
  return below->xAccess(below, name, flags, is);
}
static int on_full_name(sqlite3_vfs *vfs, const char *name, int bytes, char *to) {
  (void)vfs;
  return below->xFullPathname(below, name, bytes, to);
}

int sqlite3_recorder_init(sqlite3 *connection, char **message, const sqlite3_api_routines *functions) {
  SQLITE_EXTENSION_INIT2(functions);
  (void)connection;
  (void)message;
  if (notes >= 0) return SQLITE_OK_LOAD_PERMANENTLY;
  const char *path = getenv("QUINION_RECORD");
  if (!path || (notes = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600)) < 0) return SQLITE_ERROR;
  below = sqlite3_vfs_find(0);
  recorder = *below;
  recorder.szOsFile = sizeof(struct file) + below->szOsFile;
  recorder.zName = "recorder";
  recorder.xOpen = on_open;
  recorder.xDelete = on_delete;
  recorder.xAccess = on_access;
  recorder.xFullPathname = on_full_name;
  int code = sqlite3_vfs_register(&recorder, 1);
  return code == SQLITE_OK ? SQLITE_OK_LOAD_PERMANENTLY : code;
}
