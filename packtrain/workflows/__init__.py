"""The workflows, one module each: settings and events in, a result out. They print nothing; the command line does."""
