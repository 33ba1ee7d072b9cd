from headwise.cli import main

raise SystemExit(main())
