//! Digests of blocks: CRC-32/ISO-HDLC (the zip descriptor's and S3's checksum) and XXH3-128 (ours).

use twox_hash::XxHash3_128;

/// Bytes of a payload that share one digest: the unit that is verified and, when damaged, named.
pub const BLOCK_BYTES: u64 = 4 << 20;

/// Small enough to stay in L2 between the two passes; measured best of 16 KiB to 1 MiB here (docs/design).
const STRIDE_BYTES: usize = 64 << 10;

/// Both digests of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockDigest {
    /// CRC-32/ISO-HDLC, the one zip and S3 use.
    pub crc32: u32,
    /// XXH3 with 128 bits, seed 0.
    pub xxh3: u128,
}

/// XXH3-128 of `bytes`.
pub fn xxh3(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

/// CRC-32/ISO-HDLC of `bytes`.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// CRC-32 of `a` followed by `b`, from the CRC of each and the length of `b` in bytes.
pub fn crc32_combine(a: u32, b: u32, b_bytes: u64) -> u32 {
    let mut whole = crc32fast::Hasher::new_with_initial_len(a, 0);
    whole.combine(&crc32fast::Hasher::new_with_initial_len(b, b_bytes));
    whole.finalize()
}

/// Which digest is taken of bytes while they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DigestKind {
    /// None: the answer is 0.
    None,
    /// CRC-32/ISO-HDLC.
    Crc32,
    /// XXH3-128.
    Xxh3,
}

/// One digest in the making.
pub(crate) enum RunningDigest {
    None,
    Crc32(crc32fast::Hasher),
    Xxh3(Box<XxHash3_128>),
}

impl RunningDigest {
    pub(crate) fn new(kind: DigestKind) -> Self {
        match kind {
            DigestKind::None => Self::None,
            DigestKind::Crc32 => Self::Crc32(crc32fast::Hasher::new()),
            DigestKind::Xxh3 => Self::Xxh3(Box::new(XxHash3_128::new())),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::None => {}
            Self::Crc32(crc) => crc.update(bytes),
            Self::Xxh3(xxh3) => xxh3.write(bytes),
        }
    }

    pub(crate) fn finish(self) -> u128 {
        match self {
            Self::None => 0,
            Self::Crc32(crc) => crc.finalize().into(),
            Self::Xxh3(xxh3) => xxh3.finish_128(),
        }
    }
}

/// Block digests and the CRC of a payload that arrives piece by piece.
pub struct Digester {
    blocks: Vec<BlockDigest>,
    open: XxHash3_128,
    open_crc: u32,
    open_bytes: u64,
    crc32: u32,
}

impl Default for Digester {
    fn default() -> Self {
        Self { blocks: Vec::new(), open: XxHash3_128::new(), open_crc: 0, open_bytes: 0, crc32: 0 }
    }
}

impl Digester {
    /// Takes the next bytes, and returns their own CRC-32.
    pub fn update(&mut self, mut bytes: &[u8]) -> u32 {
        let mut piece_crc = 0;
        while !bytes.is_empty() {
            let room = (BLOCK_BYTES - self.open_bytes).min(bytes.len() as u64) as usize;
            let (head, tail) = bytes.split_at(room);
            let mut crc = crc32fast::Hasher::new();
            for stride in head.chunks(STRIDE_BYTES) {
                crc.update(stride);
                self.open.write(stride);
            }
            let crc = crc.finalize();
            self.open_crc = crc32_combine(self.open_crc, crc, room as u64);
            piece_crc = crc32_combine(piece_crc, crc, room as u64);
            self.open_bytes += room as u64;
            if self.open_bytes == BLOCK_BYTES {
                self.close();
            }
            bytes = tail;
        }
        piece_crc
    }

    /// CRC-32 of everything so far.
    pub fn crc32(&self) -> u32 {
        crc32_combine(self.crc32, self.open_crc, self.open_bytes)
    }

    /// The blocks' digests and the CRC-32 of the whole.
    pub fn finish(mut self) -> (Vec<BlockDigest>, u32) {
        if self.open_bytes > 0 {
            self.close();
        }
        (self.blocks, self.crc32)
    }

    fn close(&mut self) {
        self.crc32 = self.crc32();
        self.blocks.push(BlockDigest { crc32: self.open_crc, xxh3: self.open.finish_128() });
        self.open = XxHash3_128::new();
        (self.open_crc, self.open_bytes) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combined_crc_is_the_crc_of_the_whole() {
        let bytes: Vec<u8> = (0..200_000u32).map(|i| (i * 31 % 251) as u8).collect();
        for cut in [0, 1, 65_536, 199_999, 200_000] {
            let (a, b) = bytes.split_at(cut);
            assert_eq!(crc32_combine(crc32(a), crc32(b), b.len() as u64), crc32(&bytes));
        }
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926); // the check value of CRC-32/ISO-HDLC
    }

    #[test]
    fn pieces_of_any_length_give_the_digests_of_the_blocks() {
        let bytes: Vec<u8> = (0..BLOCK_BYTES as usize * 2 + 777).map(|i| (i * 7 % 256) as u8).collect();
        let expected: Vec<BlockDigest> = {
            let digest = |block: &[u8]| BlockDigest { crc32: crc32(block), xxh3: xxh3(block) };
            bytes.chunks(BLOCK_BYTES as usize).map(digest).collect()
        };
        for piece_bytes in [bytes.len(), 1 << 20, 3_333_333, BLOCK_BYTES as usize] {
            let mut digester = Digester::default();
            for piece in bytes.chunks(piece_bytes) {
                assert_eq!(digester.update(piece), crc32(piece));
            }
            assert_eq!(digester.crc32(), crc32(&bytes));
            assert_eq!(digester.finish(), (expected.clone(), crc32(&bytes)));
        }
    }
}
