//! Messages: the descriptors that a message carries, on its way out or as it has arrived.
//!
//! ```text
//!   struct msghdr --control--> | header | descriptors | header | ... |     those of SOL_SOCKET, SCM_RIGHTS
//! ```
//!
//! The message is the program's memory, which may be anything: it is read as `faults.rs` reads what may not be there.

use core::ffi::{c_int, c_uint, c_void};
use core::mem::offset_of;

use crate::faults;

#[repr(C)]
pub struct Message {
    name: *mut c_void,
    name_len: u32,
    parts: *mut c_void,
    parts_len: usize,
    control: *mut u8,
    control_len: usize,
    flags: c_int,
}

#[repr(C)]
pub struct Messages {
    pub message: Message,
    len: c_uint,
}

/// Calls `tell` for each descriptor in the control data of the message at an address; `None` if some could not be read.
/// Only while this process is served (`process.rs`).
pub fn descriptors_in(message: usize, tell: fn(c_int)) -> Option<()> {
    const HEADER: usize = 16;
    const SOL_SOCKET_RIGHTS: [u8; 8] = [1, 0, 0, 0, 1, 0, 0, 0];
    let word = |at: usize| {
        let mut bytes = [0; 8];
        faults::read(at, &mut bytes).then(|| usize::from_ne_bytes(bytes))
    };
    let control = word(message.wrapping_add(offset_of!(Message, control)))?;
    let len = word(message.wrapping_add(offset_of!(Message, control_len)))?;
    let mut at = 0;
    while control != 0 && len - at >= HEADER {
        let header = control.wrapping_add(at);
        let (bytes, kind) = (word(header)?, word(header.wrapping_add(8))?);
        if bytes < HEADER || bytes > len - at {
            break;
        }
        if kind.to_ne_bytes() == SOL_SOCKET_RIGHTS {
            for i in 0..(bytes - HEADER) / 4 {
                let mut fd = [0; 4];
                if !faults::read(header.wrapping_add(HEADER + 4 * i), &mut fd) {
                    return None;
                }
                tell(c_int::from_ne_bytes(fd));
            }
        }
        at = (at + bytes.next_multiple_of(8)).min(len);
    }
    Some(())
}
