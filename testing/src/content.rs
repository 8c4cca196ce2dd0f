//! Content: page contents that hold their owner, and the checker of what a read returned.
//!
//! Every 64 bytes of a test file, a **line**, hold the file, the page, the line's offset in the page, a generation, and
//! words that depend on all four:
//!
//! ```text
//!   word  0           1      2             3          4 .. 7
//!        [gen | file] [page] [gen | offset] [mark]     [mark, scrambled four ways]      8 bytes each
//! ```
//!
//! A file's bytes at a position are a function of (file, position, generation), so a test needs no copy of the file.
//! The **generation** is the version of a page: a test that rewrites or refills a page increments it.
//!
//! [`verify`] accepts a buffer if and only if each page of it is of *one* generation, byte for byte: lines of two
//! generations, two files, two places or half a line of another are all refused. Neighbouring pages may differ in
//! generation. Any whole word but word 1 tells its generation, so this holds for ranges of any size and alignment that
//! contain one; a shorter shred is checked by the bytes in it that do not depend on the generation.

use std::ops::RangeInclusive;

/// Bytes in a page of a test file.
pub const PAGE: usize = 4096;
/// Bytes in a line, the unit that describes itself.
pub const LINE: usize = 64;
const WORD: usize = 8;
const WORDS: usize = LINE / WORD;

/// The bytes of one page of a file.
pub fn page_content(file: u32, page: u64, generation: u32) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    fill_content(&mut bytes, file, page * PAGE as u64, generation);
    bytes
}

/// Fills `buf` with the bytes of a file from `position` on, all of one generation.
pub fn fill_content(buf: &mut [u8], file: u32, position: u64, generation: u32) {
    let (head, lines) = buf.split_at_mut(to_next_line(position).min(buf.len()));
    let aligned = position + head.len() as u64;
    if !head.is_empty() {
        let inside = (position % LINE as u64) as usize;
        let line = Place::of(file, position).line(generation);
        head.copy_from_slice(&line[inside..inside + head.len()]);
    }
    for (number, bytes) in lines.chunks_mut(LINE).enumerate() {
        let line = Place::of(file, aligned + (number * LINE) as u64).line(generation);
        bytes.copy_from_slice(&line[..bytes.len()]);
    }
}

/// Checks that `buf` holds the bytes of `file` from `position` on, each page of one generation.
/// The error says where it is wrong, and what is there instead.
pub fn verify(buf: &[u8], file: u32, position: u64) -> Result<(), String> {
    generations(buf, file, position).map(|_| ())
}

/// As [`verify`]; the least and the greatest generation met, or `None` if no whole word told one.
pub fn generations(buf: &[u8], file: u32, position: u64) -> Result<Option<RangeInclusive<u32>>, String> {
    let mut met: Option<RangeInclusive<u32>> = None;
    let (mut rest, mut at) = (buf, position);
    while !rest.is_empty() {
        let in_page = (PAGE - (at % PAGE as u64) as usize).min(rest.len());
        let (part, next) = rest.split_at(in_page);
        if let Some(generation) = one_page(part, file, at)? {
            met = Some(match met {
                None => generation..=generation,
                Some(met) => generation.min(*met.start())..=generation.max(*met.end()),
            });
        }
        (rest, at) = (next, at + in_page as u64);
    }
    Ok(met)
}

fn one_page(part: &[u8], file: u32, position: u64) -> Result<Option<u32>, String> {
    let Some(generation) = told_generation(part, file, position) else {
        return shred(part, file, position).map(|()| None);
    };
    let (head, lines) = part.split_at(to_next_line(position).min(part.len()));
    check_piece(head, file, position, generation)?;
    let mut at = position + head.len() as u64;
    let mut whole = lines.chunks_exact(LINE);
    for line in &mut whole {
        let line: &[u8; LINE] = line.try_into().expect("a line is 64 bytes");
        if *line != Place::of(file, at).line(generation) {
            check_piece(line, file, at, generation)?;
        }
        at += LINE as u64;
    }
    check_piece(whole.remainder(), file, at, generation)?;
    Ok(Some(generation))
}

/// Compares less than a line, or a line that is known to be wrong, byte by byte.
fn check_piece(piece: &[u8], file: u32, position: u64, generation: u32) -> Result<(), String> {
    let inside = (position % LINE as u64) as usize;
    let right = Place::of(file, position).line(generation);
    match piece.iter().zip(&right[inside..]).position(|(is, should)| is != should) {
        None => Ok(()),
        Some(byte) => Err(complaint(Piece { bytes: piece, file, position }, byte, Some(generation))),
    }
}

/// Checks a part without a whole word by the bytes that are the same in all generations.
fn shred(part: &[u8], file: u32, position: u64) -> Result<(), String> {
    for (byte, is) in part.iter().enumerate() {
        let at = position + byte as u64;
        let inside = (at % LINE as u64) as usize;
        let place = Place::of(file, at);
        let told = matches!(inside, 0..4 | 8..16 | 16..20);
        if told && *is != place.line(0)[inside] {
            return Err(complaint(Piece { bytes: part, file, position }, byte, None));
        }
    }
    Ok(())
}

/// The generation of the first whole word of a page's part, right or wrong.
fn told_generation(part: &[u8], file: u32, position: u64) -> Option<u32> {
    let mut at = (WORD - (position % WORD as u64) as usize) % WORD;
    while let Some(word) = part.get(at..at + WORD) {
        let word = u64::from_le_bytes(word.try_into().expect("a word is 8 bytes"));
        let place = Place::of(file, position + at as u64);
        let number = (position as usize + at) % LINE / WORD;
        if let Some(generation) = place.generation_of(number, word) {
            return Some(generation);
        }
        at += WORD;
    }
    None
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    file: u32,
    page: u64,
    offset: u32,
}

impl Place {
    #[inline]
    fn of(file: u32, position: u64) -> Self {
        let offset = (position % PAGE as u64) as u32 / LINE as u32 * LINE as u32;
        Self { file, page: position / PAGE as u64, offset }
    }

    #[inline]
    fn line(self, generation: u32) -> [u8; LINE] {
        let high = u64::from(generation) << 32;
        let mark = self.mark(generation);
        let mut line = [0; LINE];
        let fields = [high | u64::from(self.file), self.page, high | u64::from(self.offset), mark];
        for number in 0..WORDS {
            let word = if number < fields.len() { fields[number] } else { scramble(number, mark) };
            line[number * WORD..][..WORD].copy_from_slice(&word.to_le_bytes());
        }
        line
    }

    /// A number that depends on all; for one place, generations and marks are one to one.
    #[inline]
    fn mark(self, generation: u32) -> u64 {
        mix(self.seed().wrapping_add(u64::from(generation)))
    }
    #[inline]
    fn seed(self) -> u64 {
        mix(mix(self.page ^ 0x5157) ^ (u64::from(self.file) << 32 | u64::from(self.offset)))
    }

    /// The generation for which word `number` of this line is `word`; for words 0 and 2 the one it names.
    fn generation_of(self, number: usize, word: u64) -> Option<u32> {
        let mark = match number {
            1 => return None,
            0 | 2 => return Some((word >> 32) as u32),
            3 => word,
            _ => unscramble(number, word),
        };
        // A mark of another place gives a number that is no generation; 0 then stands for any, and the comparison that
        // follows finds the fault.
        Some(u32::try_from(unmix(mark).wrapping_sub(self.seed())).unwrap_or(0))
    }
}

/// The bytes at a position of a file.
#[derive(Clone, Copy)]
struct Piece<'p> {
    bytes: &'p [u8],
    file: u32,
    position: u64,
}

#[cold]
fn complaint(piece: Piece<'_>, byte: usize, generation: Option<u32>) -> String {
    let Piece { bytes, file, position } = piece;
    let at = position + byte as u64;
    let of = generation.map_or("any generation".into(), |generation| format!("generation {generation}"));
    let right = format!("file {file} page {} {of}", at / PAGE as u64);
    format!("byte {at} is not of {right}: {}", portrait(bytes, position))
}

/// A description of a line, if it is whole and undamaged.
fn portrait(piece: &[u8], position: u64) -> String {
    let Ok(line) = <&[u8; LINE]>::try_from(piece) else {
        return format!("{} bytes at {position} are {piece:02x?}", piece.len());
    };
    let word = |number: usize| {
        u64::from_le_bytes(line[number * WORD..][..WORD].try_into().expect("a word is 8 bytes"))
    };
    let place = Place { file: word(0) as u32, page: word(1), offset: word(2) as u32 };
    let generation = (word(0) >> 32) as u32;
    if *line == place.line(generation) {
        let Place { file, page, offset } = place;
        format!("here is file {file} page {page} generation {generation} offset {offset}")
    } else if line.iter().all(|byte| *byte == 0) {
        "here are zeroes".into()
    } else {
        format!("here is a mixture, {line:02x?}")
    }
}

/// Bytes from `position` to the start of the next line; 0 at the start of one.
fn to_next_line(position: u64) -> usize {
    (LINE - (position % LINE as u64) as usize) % LINE
}

// Odd, so that multiplying by them can be undone; otherwise well mixed bits.
const FIRST: u64 = 0xd6e8_feb8_6659_fd93;
const SECOND: u64 = 0xa3ec_647d_a1b7_5c4b;
const FIRST_UNDONE: u64 = undone(FIRST);
const SECOND_UNDONE: u64 = undone(SECOND);

/// The number that undoes a multiplication by `odd`, by Newton's steps: each doubles the right bits.
const fn undone(odd: u64) -> u64 {
    let mut inverse = odd;
    let mut step = 0;
    while step < 6 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
        step += 1;
    }
    inverse
}

#[inline]
const fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 32).wrapping_mul(FIRST);
    x = (x ^ x >> 32).wrapping_mul(SECOND);
    x ^ x >> 32
}
#[inline]
const fn unmix(mut x: u64) -> u64 {
    x = (x ^ x >> 32).wrapping_mul(SECOND_UNDONE);
    x = (x ^ x >> 32).wrapping_mul(FIRST_UNDONE);
    x ^ x >> 32
}
#[inline]
const fn scramble(number: usize, mark: u64) -> u64 {
    (mark ^ number as u64).wrapping_mul(FIRST).rotate_left(8 * number as u32)
}
#[inline]
const fn unscramble(number: usize, word: u64) -> u64 {
    word.rotate_right(8 * number as u32).wrapping_mul(FIRST_UNDONE) ^ number as u64
}

/// Pseudo-random numbers, the same for the same seed.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Dice that start at `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(SECOND);
        mix(self.0)
    }
    /// The next number below `end`, which is at least 1.
    pub fn below(&mut self, end: u64) -> u64 {
        self.roll() % end
    }
}
