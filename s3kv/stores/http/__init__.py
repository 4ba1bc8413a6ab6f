"""HTTP/1.1 that receives bodies straight into the caller's memory."""
