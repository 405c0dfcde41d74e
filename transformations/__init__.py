"""Every rewrite of an SDFG, one file each, named after its class."""
