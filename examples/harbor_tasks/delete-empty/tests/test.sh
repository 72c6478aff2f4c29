#!/bin/sh
if [ "$(ls birds | tr "\n" " ")" = "a.txt b.txt " ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
