"""How an engine decides: pure decisions (`sglang`), the machine that carries them out and leaps (`iteration`)."""
