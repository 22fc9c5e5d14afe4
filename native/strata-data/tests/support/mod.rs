//! Data sets that are written and read without Python.
#![allow(dead_code)] // each test file uses a part

pub mod readers;
pub mod writers;
