"""ThunderSyncRL as a plugin of SkyRL: the same synchronous update, its work started as soon as inputs are fixed."""

__version__ = "0.1.0"
