"""What a person asks for, one module each: settings and events in, a result out. The command line parses and prints."""
