"""The keys and states of the native engine: pages on the device, copies on the host, states of recurrent layers."""
