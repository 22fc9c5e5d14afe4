//! Compiles proto/strata/v1 with protox, so that no protoc binary is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}");
    let files = protox::compile(["strata/v1/checkpoint.proto"], [root])?;
    // Sorted maps: the same manifest is the same bytes.
    prost_build::Config::new().btree_map(["."]).compile_fds(files)?;
    Ok(())
}
