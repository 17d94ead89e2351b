"""How many drafted tokens to verify, and with what confidence: pure numbers, no model."""
