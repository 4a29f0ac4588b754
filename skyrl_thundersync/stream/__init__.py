"""What a batch is made of and when its pieces may run. Plain Python: no torch, no Ray, no SkyRL."""
