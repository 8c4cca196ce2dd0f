//! Folio: the bytes of a folio, a naturally aligned run of 2^order pages that is cached together.
//!
//! A folio is named by its first frame. Its state stands in that frame's [`Descriptor`](crate::arena::Descriptor); its
//! bytes are the frames themselves and are touched only by [`copy`] or by the device.
//!
//! ```text
//!   slot in the index --hint--> Descriptor { word, mapping, index } --same number--> 4 KiB of bytes
//!                                     |                                                    |
//!                        look, check  |                     copy                           |
//!                        look again   v  <-------------------------------------------------+
//! ```
//!
//! The **hit protocol** is [`begin_read`](crate::arena::Descriptor::begin_read), a copy, and
//! [`end_read`](crate::arena::Descriptor::end_read). It stores nothing that others see. Whatever led the reader here, a
//! stale slot or a recycled node, the descriptor says whose bytes these are, before and after the copy. A folio that is
//! written in place is read page by page ([`written`]).
//!
//! `folio` of crate `quinion` holds, locks, pins and writes folios, and has the invariants of both.

pub mod copy;
#[cfg(not(quinion_model))]
pub mod written;
