"""Messages of the wire, generated from proto/qkv/v1 by generate.sh."""
