"""What keeps a device's data private: clipping, noise, and what they cost. NumPy alone, but for the accounting."""
