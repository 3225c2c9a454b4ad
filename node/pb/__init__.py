"""Hold the generated protobuf modules."""
