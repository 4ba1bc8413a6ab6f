"""The I/O process: the asyncio loop that holds all S3 traffic of one worker."""
