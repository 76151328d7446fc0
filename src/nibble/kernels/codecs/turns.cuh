// Turns of two warpgroups of a block, 0 and 1, by named barriers 1 and 2: one goes on where the other has ended its turn.
// Before its first turn, that of 0, 1 ends one.
DEVICE void await_turn(int warpgroup) { asm volatile("bar.sync %0,256;" :: "r"(1 + warpgroup) : "memory"); }
DEVICE void end_turn(int warpgroup) { asm volatile("bar.arrive %0,256;" :: "r"(2 - warpgroup) : "memory"); }

// Whether it is so in one of the warpgroup's threads, by named barriers 3 and 4.
DEVICE bool any_of_warpgroup(bool x, int warpgroup) {
  int any;
  asm volatile("{\n.reg .pred p,q;\nsetp.ne.s32 q,%1,0;\nbar.red.or.pred p,%2,128,q;\nselp.s32 %0,1,0,p;\n}"
               : "=r"(any) : "r"(int(x)), "r"(3 + warpgroup) : "memory");
  return any;
}
