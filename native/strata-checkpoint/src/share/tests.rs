//! Promises of the schedule, for any needs.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::item::{Digests, Kind};

const MIB: u64 = 1 << 20;

fn item(object: u32, item_offset: u64, item_bytes: u64) -> Item {
    Item {
        fqn: Arc::default(),
        offsets: None,
        index: None,
        kind: Kind::Bytes,
        dtype: Arc::from(""),
        shape: Arc::default(),
        strides: Arc::default(),
        object,
        item_offset,
        item_bytes,
        payload_skip: 0,
        payload_bytes: item_bytes,
        digests: Digests::None,
        inline: None,
        whole_crc32: None,
        encoding: None,
    }
}

/// Payloads of so many MiB, one after another.
fn numbering(mib: &[u64]) -> Numbering {
    let items: Vec<Item> = mib.iter().enumerate().map(|(i, mib)| item(i as u32, 0, mib * MIB)).collect();
    Numbering::new(&items.into())
}

fn bits(len: usize, set: impl IntoIterator<Item = usize>) -> Bits {
    let mut bits = Bits::none(len);
    set.into_iter().for_each(|number| bits.set(number));
    bits
}

#[test]
fn names_of_one_payload_share_their_blocks() {
    let numbering =
        Numbering::new(&vec![item(0, 0, 9 * MIB), item(0, 9 * MIB, MIB), item(0, 0, 9 * MIB), item(1, 0, 0)].into());
    assert_eq!((0..3).map(|row| numbering.number(row, 0)).collect::<Vec<_>>(), [0, 3, 0]);
    assert_eq!(numbering.bytes, [4 * MIB, 4 * MIB, MIB, MIB]);
}

#[test]
fn what_all_need_is_read_in_equal_shares() {
    let numbering = numbering(&[64, 64]);
    let len = numbering.len();
    let schedule = Schedule::new(&numbering, vec![bits(len, 0..len); 4], 64 * MIB);
    assert_eq!(schedule.rounds(), 2);
    for rank in 0..4 {
        let own = (0..len).filter(|number| schedule.turn(*number).unwrap().owner == rank).count();
        assert_eq!(own, len / 4, "rank {rank}");
        assert_eq!(schedule.most_bytes(rank), 64 * MIB);
    }
    // Neighbours, so that they are one request.
    assert!((0..4).all(|number| schedule.turn(number) == schedule.turn(0)));
}

#[test]
fn ranks_that_share_nothing_do_not_wait_for_each_other() {
    // Two stages of a pipeline, two replicas each.
    let numbering = numbering(&[32, 32]);
    let len = numbering.len();
    let (head, tail) = (bits(len, 0..len / 2), bits(len, len / 2..len));
    let schedule = Schedule::new(&numbering, vec![head.clone(), tail.clone(), head, tail], 32 * MIB);
    assert_eq!(schedule.rounds(), 1);
    assert_eq!(schedule.needers(0), [0, 2]);
    assert_eq!(schedule.needers(len - 1), [1, 3]);
}

#[test]
fn a_payload_that_one_rank_needs_is_left_to_it() {
    let numbering = numbering(&[8, 8, 8]);
    // The first for rank 0 alone, the second half each, the third with a block that both need.
    let schedule = Schedule::new(&numbering, vec![bits(6, [0, 1, 2, 4, 5]), bits(6, [3, 5])], 64 * MIB);
    assert_eq!((0..4).map(|number| schedule.turn(number)).collect::<Vec<_>>(), [None; 4]);
    assert_eq!(schedule.turn(4), Some(Turn { round: 0, owner: 0 }));
    assert_eq!(schedule.turn(5).map(|turn| turn.round), Some(0));
}

proptest! {
    #[test]
    fn each_shared_block_has_one_owner_that_needs_it_and_no_round_is_too_large(
        payloads in prop::collection::vec(0u64..40, 0..12),
        needs in prop::collection::vec(prop::collection::vec(prop::bool::weighted(0.6), 128), 1..6),
        round_mib in 1u64..40,
    ) {
        let numbering = numbering(&payloads);
        let len = numbering.len();
        let needs: Vec<Bits> = needs.iter().map(|wants| bits(len, (0..len).filter(|number| wants[number % 128]))).collect();
        let schedule = Schedule::new(&numbering, needs.clone(), round_mib * MIB);
        let mut held = vec![vec![(0u64, 0u64); needs.len()]; schedule.rounds() as usize];
        for payload in &numbering.payloads {
            let shared = payload.clone().any(|number| schedule.needers(number).len() > 1);
            for number in payload.clone() {
                let needers = schedule.needers(number);
                match schedule.turn(number) {
                    None => prop_assert!(needers.is_empty() || !shared),
                    Some(turn) => {
                        prop_assert!(shared && needers.contains(&turn.owner));
                        for rank in needers {
                            let (bytes, blocks) = held[turn.round as usize][rank as usize];
                            held[turn.round as usize][rank as usize] = (bytes + numbering.bytes[number], blocks + 1);
                        }
                    }
                }
            }
        }
        for round in &held {
            prop_assert!(round.iter().any(|(_, blocks)| *blocks > 0), "an empty round");
            for (rank, (bytes, blocks)) in round.iter().enumerate() {
                prop_assert!(*bytes <= round_mib * MIB || *blocks == 1);
                prop_assert!(*bytes <= schedule.most_bytes(rank as u32));
            }
        }
    }
}
