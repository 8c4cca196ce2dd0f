import ctypes, sys

quinion = ctypes.CDLL("libquinion.so.0.1")
quinion.qn_error_message.restype = ctypes.c_char_p
quinion.qn_pread.restype = ctypes.c_int64
quinion.qn_pread.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64]


class CacheOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("memory", ctypes.c_uint64), ("memory_max", ctypes.c_uint64),
                ("pinned_max", ctypes.c_uint64), ("readahead", ctypes.c_uint64), ("disk_folder", ctypes.c_char_p),
                ("disk_bytes", ctypes.c_uint64), ("spill_path", ctypes.c_char_p), ("spill_bytes", ctypes.c_uint64),
                ("flags", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]


def check(answer):
    if answer < 0:
        sys.exit(quinion.qn_error_message().decode())
    return answer


cache, file, hits = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
options = CacheOptions(size=ctypes.sizeof(CacheOptions), memory=64 << 20)
check(quinion.qn_cache_open(ctypes.byref(options), ctypes.byref(cache)))
check(quinion.qn_open(cache, sys.argv[1].encode(), None, ctypes.byref(file)))
buffer = ctypes.create_string_buffer(4096)
for _ in range(2):
    read = check(quinion.qn_pread(file, buffer, len(buffer), 0))
    check(quinion.qn_cache_stat(cache, b"hits", ctypes.byref(hits)))
    print(f"{read} bytes, {hits.value} hits")
check(quinion.qn_close(file))
check(quinion.qn_cache_close(cache))
