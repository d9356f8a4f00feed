//! RoCEv2 over UDP sockets: the soft provider of the verbs in `bowline-verbs`.
