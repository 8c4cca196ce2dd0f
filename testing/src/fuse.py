# A file system in user space, mounted at the first argument, with a file, "file", and others, "file1" to "file99". Once
# the second argument exists it answers nothing any more, or, if there are more arguments, none of the questions of
# these numbers. It ends when it is unmounted or its connection is aborted.
import ctypes, os, re, struct, sys
fuse = os.open('/dev/fuse', os.O_RDWR)
libc, how = ctypes.CDLL(None, use_errno=True), 'fd=%d,rootmode=40000,user_id=0,group_id=0' % fuse
assert libc.mount(b'fuse', sys.argv[1].encode(), b'fuse', 0, how.encode()) == 0, os.strerror(ctypes.get_errno())
print('mounted', flush=True)
def attributes(node):
    mode, size = (0o100644, 1 << 20) if node >= 2 else (0o40755, 0)
    return struct.pack('<6Q10I', node, size, size >> 9, 9, 9, 9, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
def answer(operation, node, body):
    if operation == 26: return struct.pack('<IIIIHHIIHHI28x', 7, 31, 1 << 17, 0, 9, 9, 1 << 17, 1, 0, 0, 0)
    if operation == 1 and re.fullmatch(rb'file[0-9]{0,2}\0', body):
        file = 2 + int(body[4:-1] or 0)
        return struct.pack('<4QII', file, 0, 0, 0, 0, 0) + attributes(file)
    if operation == 3: return struct.pack('<QII', 0, 0, 0) + attributes(node)
    if operation in (14, 27): return struct.pack('<QII', 0, 0, 0)
    if operation == 15:
        at, size = struct.unpack_from('<8xQI', body)
        return bytes(max(0, min(size, (1 << 20) - at)))
    if operation == 17: return bytes(80)
    return b'' if operation in (18, 25, 29, 34, 38) else None
unanswered = set(map(int, sys.argv[3:]))
while True:
    try: said = os.read(fuse, 1 << 18)
    except InterruptedError: continue
    except OSError: break
    length, operation, unique, node = struct.unpack_from('<IIQQ', said)
    hangs = (not unanswered or operation in unanswered) and os.path.exists(sys.argv[2])
    if operation in (2, 36, 42) or hangs: continue
    body = answer(operation, node, said[40:length])
    error = 0 if body is not None else -2 if operation == 1 else -38
    try: os.write(fuse, struct.pack('<IiQ', 16 + len(body or b''), error, unique) + (body or b''))
    except OSError: pass
