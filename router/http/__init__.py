"""HTTP/1.1 both ways, byte for byte: from clients, to engines. Knows no prompt."""
