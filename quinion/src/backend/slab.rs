//! Slab: values in numbered slots, so that a number can stand for a value in the kernel's hands.
//!
//! A [`Key`] is the slot's number and its generation. The generation steps when
//! a slot is emptied, so a key finds the value it was made for or nothing.

/// The name of a value in a [`Slab`]: {generation 32 | slot 32}.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Key(pub(super) u64);

impl Key {
    fn slot(self) -> usize {
        self.0 as u32 as usize
    }
    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<SlabSlot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct SlabSlot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Slab<T> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
    pub(super) fn insert(&mut self, value: T) -> Key {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(SlabSlot { generation: 0, value: None });
            (self.slots.len() - 1) as u32
        });
        let place = &mut self.slots[slot as usize];
        debug_assert!(place.value.is_none(), "a free slot is empty");
        place.value = Some(value);
        Key(u64::from(place.generation) << 32 | u64::from(slot))
    }
    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let place = self.slots.get_mut(key.slot())?;
        if place.generation == key.generation() { place.value.as_mut() } else { None }
    }
    pub(super) fn remove(&mut self, key: Key) -> Option<T> {
        let place = self.slots.get_mut(key.slot())?;
        if place.generation != key.generation() {
            return None;
        }
        let value = place.value.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.free.push(key.slot() as u32);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_key_finds_its_value_or_nothing(
            ops in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..200),
        ) {
            let mut slab = Slab::new();
            let mut twin = HashMap::new();
            let mut keys = Vec::new();
            for (number, (insert, at)) in ops.into_iter().enumerate() {
                if insert || keys.is_empty() {
                    let key = slab.insert(number);
                    prop_assert!(twin.insert(key, number).is_none(), "a key is used once");
                    keys.push(key);
                } else {
                    let key = keys[at.index(keys.len())];
                    prop_assert_eq!(slab.remove(key), twin.remove(&key));
                }
                prop_assert_eq!(slab.len(), twin.len());
            }
            for key in keys {
                prop_assert_eq!(slab.get_mut(key).copied(), twin.get(&key).copied());
            }
        }
    }
}
