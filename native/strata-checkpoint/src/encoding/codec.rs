//! A block to a frame, and back. Safe code that compilers turn into vector instructions.

use std::sync::Mutex;

use zstd::bulk::{Compressor, Decompressor};

/// zstd's fastest standard level: a save must keep up with a disk, and planes gain little from a longer search
/// (docs/design, encodings).
const LEVEL: i32 = 1;

/// Bytes that are worked on at a time: with their planes they stay in the first cache.
const STRIDE_BYTES: usize = 8 << 10;

/// Memory of frames that stays allocated while nobody saves, all together.
const KEPT_BYTES: usize = 128 << 20;

/// Below this a frame's memory comes from the allocator, which keeps such pieces itself.
const LEAST_KEPT_BYTES: usize = 256 << 10;

static SCRATCH: Mutex<Vec<Scratch>> = Mutex::new(Vec::new());
static FRAMES: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// What one thread needs for a block; kept, for fresh pages cost more than the work.
struct Scratch {
    planes: Vec<u8>,
    compressor: Compressor<'static>,
    decompressor: Decompressor<'static>,
}

impl Scratch {
    /// Lends one to `work`.
    fn with<T>(work: impl FnOnce(&mut Self) -> T) -> T {
        let kept = SCRATCH.lock().expect("never poisoned").pop();
        let mut scratch = kept.unwrap_or_else(|| Self {
            planes: Vec::new(),
            compressor: Compressor::new(LEVEL).expect("zstd has this level"),
            decompressor: Decompressor::new().expect("zstd needs no dictionary"),
        });
        let done = work(&mut scratch);
        SCRATCH.lock().expect("never poisoned").push(scratch);
        done
    }
}

/// A block's frame; its memory is used again.
#[derive(Debug)]
pub struct Framed(Vec<u8>);

impl AsRef<[u8]> for Framed {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Framed {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.0);
        let mut kept = FRAMES.lock().expect("never poisoned");
        let held: usize = kept.iter().map(Vec::capacity).sum();
        if bytes.capacity() >= LEAST_KEPT_BYTES && held + bytes.capacity() <= KEPT_BYTES {
            kept.push(bytes);
        }
    }
}

fn frame_memory(bytes: usize) -> Vec<u8> {
    let mut kept = FRAMES.lock().expect("never poisoned");
    let fits = |memory: &Vec<u8>| memory.capacity() >= bytes && memory.capacity() / 2 <= bytes;
    let found = kept.iter().position(fits).map(|at| kept.swap_remove(at));
    drop(kept);
    let mut memory = found.unwrap_or_else(|| Vec::with_capacity(bytes));
    memory.clear();
    memory
}

/// The frame of a block of elements of `width` bytes (1, 2, 4 or 8), XORed with `base` if there is one.
///
/// # Panics
/// If `base` has another length.
pub fn encode_block(block: &[u8], base: Option<&[u8]>, width: usize) -> Framed {
    let mut frame = frame_memory(zstd::zstd_safe::compress_bound(block.len()));
    Scratch::with(|scratch| {
        let source = if base.is_none() && width == 1 {
            block
        } else {
            scratch.planes.resize(block.len(), 0);
            to_planes(block, base, width, &mut scratch.planes);
            &scratch.planes
        };
        scratch.compressor.compress_to_buffer(source, &mut frame).expect("the memory is as long as any frame");
    });
    Framed(frame)
}

/// Fills `block` with what `frame` was made of.
///
/// # Errors
/// If it was not made by [`encode_block`] of a block of this length.
pub fn decode_block(frame: &[u8], base: Option<&[u8]>, width: usize, block: &mut [u8]) -> Result<(), String> {
    Scratch::with(|scratch| {
        scratch.planes.resize(block.len(), 0);
        let found = scratch.decompressor.decompress_to_buffer(frame, &mut scratch.planes[..]);
        let found = found.map_err(|error| format!("a frame cannot be decompressed: {error}"))?;
        if found != block.len() {
            return Err(format!("a frame holds {found} bytes, its block has {}", block.len()));
        }
        from_planes(&scratch.planes, base, width, block);
        Ok(())
    })
}

/// Plane by plane; what is left of the last, cut element stands at the end as it is.
fn to_planes(block: &[u8], base: Option<&[u8]>, width: usize, planes: &mut [u8]) {
    match width {
        2 => split::<2>(block, base, planes),
        4 => split::<4>(block, base, planes),
        8 => split::<8>(block, base, planes),
        _ => split::<1>(block, base, planes),
    }
}

fn from_planes(planes: &[u8], base: Option<&[u8]>, width: usize, block: &mut [u8]) {
    match width {
        2 => join::<2>(planes, block),
        4 => join::<4>(planes, block),
        8 => join::<8>(planes, block),
        _ => block.copy_from_slice(planes),
    }
    if let Some(base) = base {
        xor(block, base);
    }
}

/// `block`, by `base` if there is one.
fn xor(block: &mut [u8], base: &[u8]) {
    assert_eq!(block.len(), base.len());
    block.iter_mut().zip(base).for_each(|(byte, other)| *byte ^= other);
}

fn split<const N: usize>(block: &[u8], base: Option<&[u8]>, planes: &mut [u8]) {
    let count = block.len() / N;
    let mut stride = [0; STRIDE_BYTES];
    for at in (0..block.len()).step_by(STRIDE_BYTES) {
        let source = &block[at..block.len().min(at + STRIDE_BYTES)];
        let xored = &mut stride[..source.len()];
        let source = match base {
            None => source,
            Some(base) => {
                xored.copy_from_slice(source);
                xor(xored, &base[at..at + source.len()]);
                xored
            }
        };
        let (elements, rest) = source.as_chunks::<N>();
        for byte in 0..N {
            let plane = &mut planes[byte * count + at / N..][..elements.len()];
            plane.iter_mut().zip(elements).for_each(|(to, element)| *to = element[byte]);
        }
        planes[block.len() - rest.len()..].copy_from_slice(rest); // only the last stride leaves any
    }
}

fn join<const N: usize>(planes: &[u8], block: &mut [u8]) {
    let count = block.len() / N;
    let end = count * N;
    let (elements, rest) = block.as_chunks_mut::<N>();
    for (number, elements) in elements.chunks_mut(STRIDE_BYTES / N).enumerate() {
        let at = number * (STRIDE_BYTES / N);
        let planes: [&[u8]; N] = std::array::from_fn(|byte| &planes[byte * count + at..][..elements.len()]);
        for (i, element) in elements.iter_mut().enumerate() {
            *element = std::array::from_fn(|byte| planes[byte][i]);
        }
    }
    rest.copy_from_slice(&planes[end..]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As the definition reads.
    fn planes_by_definition(bytes: &[u8], width: usize) -> Vec<u8> {
        let count = bytes.len() / width;
        let plane = |byte: usize| (0..count).map(move |i| bytes[i * width + byte]);
        (0..width).flat_map(plane).chain(bytes[count * width..].iter().copied()).collect()
    }

    /// Bytes that no two elements have alike, and that repeat somewhat.
    fn bytes_of(length: usize, seed: u64) -> Vec<u8> {
        (0..length as u64).map(|i| ((i + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 57 | i & 1) as u8).collect()
    }

    proptest! {
        #[test]
        fn planes_are_as_defined_and_come_back(
            length in prop::sample::select(vec![0, 1, 3, 7, 8, 9, 8191, 8192, 8193, 16_385, 70_001]),
            width in prop::sample::select(vec![1usize, 2, 4, 8]),
            seed in 0u64..1000,
            with_base: bool,
        ) {
            let (block, base) = (bytes_of(length, seed), bytes_of(length, seed + 77));
            let base = with_base.then_some(&base[..]);
            let mut planes = vec![0; length];
            to_planes(&block, base, width, &mut planes);
            let xored: Vec<u8> =
                block.iter().enumerate().map(|(i, byte)| byte ^ base.map_or(0, |base| base[i])).collect();
            prop_assert_eq!(&planes, &planes_by_definition(&xored, width));
            let mut back = vec![1; length];
            from_planes(&planes, base, width, &mut back);
            prop_assert_eq!(&back, &block);
        }

        #[test]
        fn a_frame_holds_its_block(
            block in prop::collection::vec(any::<u8>(), 0..3000),
            repeats in 1usize..40,
            width in prop::sample::select(vec![1usize, 2, 4, 8]),
            with_base: bool,
        ) {
            let block = block.repeat(repeats);
            let base = with_base.then(|| bytes_of(block.len(), 5));
            let frame = encode_block(&block, base.as_deref(), width);
            let mut back = vec![9; block.len()];
            decode_block(frame.as_ref(), base.as_deref(), width, &mut back).expect("its own frame");
            prop_assert_eq!(back, block);
        }

        #[test]
        fn what_is_no_frame_of_the_block_is_an_error_or_other_bytes(
            at in 0usize..400,
            bit in 0u32..8,
        ) {
            let block = bytes_of(1000, 3);
            let mut frame = encode_block(&block, None, 4).as_ref().to_vec();
            let at = at % frame.len();
            frame[at] ^= 1 << bit;
            let mut back = vec![0; 1000];
            // Never a panic, never more than the block: what it is worth the digests tell.
            let _ = decode_block(&frame, None, 4, &mut back);
            prop_assert!(decode_block(&frame[..at], None, 4, &mut back).is_err());
            let whole = encode_block(&block, None, 4);
            prop_assert!(decode_block(whole.as_ref(), None, 4, &mut vec![0; 999]).is_err());
            prop_assert!(decode_block(whole.as_ref(), None, 4, &mut vec![0; 1001]).is_err());
        }
    }

    #[test]
    fn noise_takes_hardly_more_than_itself() {
        let mut state = 1u64;
        let noise: Vec<u8> = (0..1 << 20)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        assert!(encode_block(&noise, None, 4).as_ref().len() < noise.len() + 200);
    }
}
