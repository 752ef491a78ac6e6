"""What schedulers answer, decoded: pure functions from text to our nouns, no calls, no clock."""
