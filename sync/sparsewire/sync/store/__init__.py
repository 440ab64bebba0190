"""Object stores: the seam (`base`), memory, directory and S3 behind it, and the choice by URL (`open`)."""
