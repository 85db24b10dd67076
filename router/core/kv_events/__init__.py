"""One engine's event stream: decode, order, prove."""
