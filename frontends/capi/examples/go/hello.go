package main

// #cgo pkg-config: quinion
// #include <quinion.h>
// #include <stdlib.h>
import "C"

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"
)

// check makes an error of a negative errno. The message is of the thread: the caller holds it by LockOSThread.
func check(answer C.int64_t) C.int64_t {
	if answer < 0 {
		fmt.Fprintln(os.Stderr, errors.New(C.GoString(C.qn_error_message())))
		os.Exit(1)
	}
	return answer
}

func main() {
	runtime.LockOSThread()
	var cache *C.qn_cache
	var file *C.qn_file
	options := C.qn_cache_options{size: C.sizeof_qn_cache_options, memory: 64 << 20}
	check(C.int64_t(C.qn_cache_open(&options, &cache)))
	path := C.CString(os.Args[1])
	defer C.free(unsafe.Pointer(path))
	check(C.int64_t(C.qn_open(cache, path, nil, &file)))
	buffer := make([]byte, 4096)
	for round := 0; round < 2; round++ {
		bytes := check(C.qn_pread(file, unsafe.Pointer(&buffer[0]), C.size_t(len(buffer)), 0))
		stats := C.qn_stats{size: C.sizeof_qn_stats}
		check(C.int64_t(C.qn_cache_stats(cache, &stats)))
		fmt.Printf("%d bytes, %d hits\n", bytes, stats.hits)
	}
	check(C.int64_t(C.qn_close(file)))
	check(C.int64_t(C.qn_cache_close(cache)))
}
